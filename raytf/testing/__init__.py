"""Test a job under the faults of a real cluster: an elastic local cluster, and faults at chosen steps.

    from raytf.testing import ElasticCluster, Fault, FaultPlan, Kind

    plan = FaultPlan([Fault(50, Kind.WORKER), Fault(100, Kind.ADD), Fault(150, Kind.NODE)])
    with ElasticCluster(nodes=2) as cluster:
        report = plan.run(["python", "job.py", "--status-file", str(status)], status, log, cluster)
    assert report.code == 0, report

Faults come from outside: signals, nodes that stop, a proxy in front of the object store. Nothing is patched. See
docs/guides/testing-against-faults.md.
"""

from raytf.testing.cluster import ElasticCluster, Node
from raytf.testing.faults import Fault, FaultPlan, Injection, Kind, Report
from raytf.testing.job import Job
from raytf.testing.metadata_server import MetadataServer
from raytf.testing.processes import environment
from raytf.testing.storage_proxy import StorageProxy

__all__ = [
    "ElasticCluster",
    "Fault",
    "FaultPlan",
    "Injection",
    "Job",
    "Kind",
    "MetadataServer",
    "Node",
    "Report",
    "StorageProxy",
    "environment",
]

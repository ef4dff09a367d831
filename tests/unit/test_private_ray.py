"""What raytf takes of Ray's insides is there, and taken in one place; and whether a node lives that answers."""

from __future__ import annotations

import ast
import re
import socket
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from ray.core.generated.common_pb2 import ActorDeathCause, ActorDiedErrorContext
from ray.exceptions import RayActorError

from raytf._ray import raylets, state
from raytf._ray.raylets import NodeReply
from tests.support import private_names

_CLIENT = "ray.train.v2._internal.execution.scaling_policy.autoscaling_coordinator_client"
#: The version of Ray in which everything was last checked to be there and to do what raytf expects.
_VERSION = "2.60.0"
#: Class or module -> names of its attributes that raytf uses and that its imports do not name.
_ATTRIBUTES = {
    "ray._private.function_manager.FunctionActorManager": "export_setup_func",
    "ray._private.node.Node": (
        "all_processes gcs_address get_session_dir_path node_ip_address node_manager_port plasma_store_socket_name "
        "raylet_socket_name start_log_monitor start_monitor"
    ),
    "ray._private.ray_constants": "ENABLE_RAY_CLUSTER RAY_DISABLE_FAILURE_SIGNAL_HANDLER",
    "ray._private.services": "start_api_server",
    "ray._private.state.GlobalState": "_connect_and_get_accessor actor_table get_draining_nodes get_system_config",
    "ray._private.utils": "set_sigterm_handler",
    "ray._private.worker.Worker": (
        "core_worker function_actor_manager gcs_client gcs_error_subscriber listener_thread node threads_stopped "
        "worker_id"
    ),
    "ray._raylet": "GcsErrorSubscriber RAY_NODE_ID_KEY",
    "ray._raylet.CoreWorker": "get_job_config",
    "ray._raylet.GlobalStateAccessor": "get_placement_group_table",
    "ray._raylet.InnerGcsClient": "drain_node get_all_node_info",
    "ray.autoscaler._private._azure.node_provider": "AzureNodeProvider",
    "ray.autoscaler._private._azure.node_provider.AzureNodeProvider": "compute_client create_node",
    "ray.autoscaler._private.aws.node_provider": "AWSNodeProvider BOTO_MAX_RETRIES make_ec2_resource",
    "ray.autoscaler._private.aws.node_provider.AWSNodeProvider": "create_node ec2_fail_fast",
    "ray.autoscaler._private.cli_logger._CliLogger": "abort",
    "ray.autoscaler._private.gcp.node.GCPCompute": "create_instance wait_for_operation",
    "ray.autoscaler._private.gcp.node.GCPNodeType": "TPU",
    "ray.autoscaler._private.gcp.node_provider": (
        "GCPCompute GCPNodeProvider GCPNodeType GCPTPU _retry construct_clients_from_provider_config get_node_type"
    ),
    "ray.autoscaler._private.gcp.node_provider.GCPNodeProvider": (
        "_construct_clients _get_resource_depending_on_node_name cached_nodes"
    ),
    "ray.cloudpickle.CloudPickler": "reducer_override",
    "ray.core.generated.autoscaler_pb2": "DrainNodeReason",
    "ray.core.generated.common_pb2.ActorDeathCause": "actor_died_error_context",
    "ray.core.generated.common_pb2.ActorDiedErrorContext": "NODE_DIED",
    "ray.core.generated.gcs_pb2": "PlacementGroupTableData",
    "ray.core.generated.gcs_service_pb2": "CheckAliveRequest",
    "ray.core.generated.node_manager_pb2": "GetWorkerPIDsRequest",
    "ray.core.generated.node_manager_pb2.PrestartWorkersRequest": (
        "keep_alive_duration_secs num_workers runtime_env_info"
    ),
    "ray.core.generated.node_manager_pb2_grpc.NodeManagerServiceServicer": "GetWorkerPIDs PrestartWorkers",
    "ray.dashboard.modules.job.sdk.JobSubmissionClient": "_do_request",
    "ray.serve._private.client.ServeControllerClient": "_controller http_config",
    "ray.serve._private.controller.ServeController": "get_serve_instance_details",
    "ray.train.v2._internal.constants": (
        "DEFAULT_RAY_WARN_BLOCKING_GET_INSIDE_ASYNC_VALUE RAY_WARN_BLOCKING_GET_INSIDE_ASYNC_ENV_VAR "
        "get_env_vars_to_propagate"
    ),
    "ray.train.v2._internal.exceptions.UserExceptionWithTraceback": "_base_exc",
    "ray.train.v2._internal.exceptions.WorkerHealthCheckFailedError": "health_check_failure",
    "ray.train.v2._internal.execution.callback.WorkerGroupCallback": "before_worker_group_shutdown",
    "ray.train.v2._internal.execution.checkpoint.report_handler.ReportCallbackHandler": "after_worker_group_start",
    "ray.train.v2._internal.execution.checkpoint.sync_actor": "SynchronizationActor",
    "ray.train.v2._internal.execution.context": "TrainContext",
    "ray.train.v2._internal.execution.controller.TrainController": "get_result run",
    "ray.train.v2._internal.execution.controller.controller.TrainController": (
        "_execute_resize_decision _poll_workers _run_controller_hook _step"
    ),
    "ray.train.v2._internal.execution.failure_handling.DefaultFailurePolicy": "make_decision",
    "ray.train.v2._internal.execution.failure_handling.FailureDecision": "RETRY",
    "ray.train.v2._internal.execution.scaling_policy.ElasticScalingPolicy": (
        "_autoscaling_coordinator _coordinator_client _count_possible_workers "
        "_get_num_workers_for_resource_request _get_resize_decision _maybe_send_resource_request _requester_id "
        "_send_resource_request after_controller_start after_controller_state_update "
        "make_decision_for_non_running_worker_group make_decision_for_running_worker_group "
        "on_controller_start_worker_group"
    ),
    f"{_CLIENT}.TrainAutoscalingCoordinatorClient": "_autoscaling_coordinator",
    "ray.train.v2._internal.execution.worker_group": "worker",
    "ray.train.v2._internal.execution.worker_group.ReplicaGroup": "start_training",
    "ray.train.v2._internal.execution.worker_group.worker_group.WorkerGroup": (
        "_assign_worker_ranks _clear_state _create_placement_group _create_workers _get_worker_runtime_env "
        "_init_train_context get_workers replace_replica_group"
    ),
    "ray.train.v2.api.config.ScalingConfig": "_resources_per_worker_not_none",
    "ray.train.v2.api.data_parallel_trainer.DataParallelTrainer": (
        "_create_default_callbacks _initialize_and_run_controller"
    ),
}


def node(name: str, port: int) -> dict:
    return {"NodeID": name, "NodeManagerAddress": "127.0.0.1", "NodeManagerPort": port}


def test_a_raylet_is_alive_silent_or_refusing_as_its_port_answers():
    server = grpc.server(ThreadPoolExecutor(1))  # it knows no method, and says so
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    with socket.socket() as frozen, socket.socket() as closed:
        frozen.bind(("127.0.0.1", 0))
        frozen.listen()  # the system takes connections, and nobody reads
        closed.bind(("127.0.0.1", 0))
        asked = [node("lives", port), node("frozen", frozen.getsockname()[1]), node("closed", closed.getsockname()[1])]
        found = raylets.ask(asked)
    server.stop(None).wait()
    assert found == {"lives": NodeReply.LIVES, "frozen": NodeReply.SILENT, "closed": NodeReply.REFUSES}


@pytest.mark.parametrize(
    ("reason", "with_node"),
    [
        (ActorDiedErrorContext.NODE_DIED, True),
        (ActorDiedErrorContext.WORKER_DIED, False),
        (ActorDiedErrorContext.RAY_KILL, False),
    ],
)
def test_what_ray_knows_of_a_death_and_its_error_does_not_say(reason: int, with_node: bool):
    cause = ActorDeathCause(actor_died_error_context=ActorDiedErrorContext(reason=reason))
    table = {"0a": {"DeathCause": cause}}
    assert state.died_with_node(RayActorError("0a"), lambda actor: table[actor]) is with_node
    assert not state.died_with_node(RayActorError("0b"), lambda actor: {})
    assert not state.died_with_node(RayActorError(), lambda actor: table[actor])


ROOMS = {path.stem: path for path in sorted((private_names.PACKAGE / "_ray").glob("*.py"))}
SEEN = private_names.listed(_ATTRIBUTES)


@pytest.mark.parametrize("path", sorted(SEEN))
def test_what_is_taken_of_ray_is_there(path: str):
    private_names.find(path)


def test_the_version_in_which_it_was_seen_may_be_installed():
    assert re.fullmatch(r"2\.60\.\d+", _VERSION)


@pytest.mark.parametrize("name", ROOMS)
def test_all_that_a_room_takes_is_there(name: str):
    assert private_names.missing(ast.parse(ROOMS[name].read_text()), SEEN) == []


def test_what_does_not_exist_is_not_found():
    for path in ("ray._private.nowhere", "ray._private.node.Node.no_such_thing", "no_such_library.at_all"):
        with pytest.raises(LookupError):
            private_names.find(path)


def test_no_other_module_takes_anything_private():
    rooms = ("_ray/", "_keras/", "_tensorflow/")
    found = {
        name: sorted(private_names.taken(tree) | private_names.foreign(tree))
        for name, tree in private_names.modules()
        if not name.startswith(rooms)
    }
    assert {name: taken for name, taken in found.items() if taken} == {}


def test_rooms_know_nothing_of_raytf():
    for name, tree in private_names.modules():
        if name.startswith(("_ray/", "_keras/", "_tensorflow/")):
            imports = [n.module or "" for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)]
            imports += [a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names]
            own = f"raytf.{name.partition('/')[0]}"
            assert [one for one in imports if one.startswith("raytf") and one != own] == [], name

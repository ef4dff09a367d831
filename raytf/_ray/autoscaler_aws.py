"""Ray's node provider for AWS; needs boto3."""

from __future__ import annotations

from ray.autoscaler._private.aws.node_provider import (
    AWSNodeProvider as AWSNodeProvider,
)
from ray.autoscaler._private.aws.node_provider import (
    make_ec2_resource as make_ec2_resource,
)
from ray.autoscaler._private.constants import BOTO_MAX_RETRIES as BOTO_MAX_RETRIES

SEEN = {
    "ray.autoscaler._private.aws.node_provider.AWSNodeProvider.create_node": "2.60.0",
    "ray.autoscaler._private.aws.node_provider.AWSNodeProvider.ec2_fail_fast": "2.60.0",
    "ray.autoscaler._private.aws.node_provider.make_ec2_resource": "2.60.0",
    "ray.autoscaler._private.constants.BOTO_MAX_RETRIES": "2.60.0",
}

"""Ray's node provider for AWS; needs boto3."""

from __future__ import annotations

from ray.autoscaler._private.aws.node_provider import (
    AWSNodeProvider as AWSNodeProvider,
)
from ray.autoscaler._private.aws.node_provider import (
    make_ec2_resource as make_ec2_resource,
)
from ray.autoscaler._private.constants import BOTO_MAX_RETRIES as BOTO_MAX_RETRIES

"""All that raytf takes of Ray's insides, which may change with any version.

A module for each part of Ray, so that a process imports what it needs and nothing else. `SEEN` lists the attributes
that imports do not name: `tests/unit/test_private_ray.py` fails when one of them or an imported name is gone, and when
another module of raytf takes something private. Knows nothing of raytf.
"""

_CLIENT = "ray.train.v2._internal.execution.scaling_policy.autoscaling_coordinator_client"
#: The version of Ray in which everything was last seen to be there and to do what is meant.
VERSION = "2.60.0"
#: Class or module -> names of its attributes that are used.
SEEN = {
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
    "ray.autoscaler._private._azure.node_provider.AzureNodeProvider": "compute_client create_node",
    "ray.autoscaler._private.aws.node_provider.AWSNodeProvider": "create_node ec2_fail_fast",
    "ray.autoscaler._private.cli_logger._CliLogger": "abort",
    "ray.autoscaler._private.gcp.node.GCPCompute": "create_instance wait_for_operation",
    "ray.autoscaler._private.gcp.node.GCPNodeType": "TPU",
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

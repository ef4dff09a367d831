"""Errors about GPUs are each sorted right: real texts of TensorFlow, XLA, CUDA, cuDNN and NCCL, with their sources.

No GPU raised them here. The texts of TensorFlow and XLA are those that its wheel holds, put together as its sources do:
`cuda_status.cc` writes "CUDA error: WHAT: NAME: DESCRIPTION", `nccl_manager.cc` "NCCL: DESCRIPTION. Set NCCL_DEBUG=WARN
for detail.". Names and descriptions of CUDA's errors are those of cuGetErrorName and cuGetErrorString (CUDA Driver API,
section 6.1), of NCCL's those of ncclGetErrorString (nccl/src/init.cc).
"""

from __future__ import annotations

import pytest
import tensorflow as tf

from raytf.config.train_config import TrainConfig
from raytf.distributed.gpu.faults import FaultFacts, FaultOwner, StepLoad, advise, asked_bytes, sort
from raytf.errors import GpuError, JobError, RaytfError, UnsupportedError, WorkerLostError
from raytf.training import worker
from raytf.training.process.gpu import explain

E = tf.errors
GPU = "/job:worker/replica:0/task:0/device:GPU:0"
GRPC = "\nAdditional GRPC error information from remote target /job:worker/replica:0/task:1 while calling RecvBuf"
ABORTED = (
    "Collective ops is aborted by: {}\nThe error could be from a previous operation. Restart your program to reset."
)
INT32 = "Collective all-reduce does not support datatype DT_INT32 on DEVICE_GPU"
OOM = (
    f"OOM when allocating tensor with shape[32,1024,64,64] and type float on {GPU} by allocator GPU_0_bfc\n"
    "\t [[{{node resnet/conv2/Conv2D}}]]\nHint: If you want to see a list of allocated tensors when OOM happens, add "
    "report_tensor_allocations_upon_oom to RunOptions for current allocation info."
)
ECC = "CUDA error: Could not synchronize CUDA stream: CUDA_ERROR_ECC_UNCORRECTABLE: uncorrectable ECC error encountered"
ILLEGAL = (
    "CUDA error: Failed to launch CUDA kernel: fusion_12; block dims: 128x1x1; grid dims: 64x1x1; shared memory size: "
    "0: CUDA_ERROR_ILLEGAL_ADDRESS: an illegal memory access was encountered"
)
CUDNN = (
    "in external/xla/xla/stream_executor/cuda/cuda_dnn.cc(5173): 'status' {} \n\t [[{{{{node conv2d/Conv2D}}}}]] "
    "[Op:__inference_train_123]"
)
ALONE, SHARED = FaultFacts(others=0), FaultFacts(others=1)

COPY = "Failed copying input tensor from {0} to {1} in order to run _EagerConst: Dst tensor is not initialized."

#: Class, text, verdict where nothing else is on the GPU.
TEXTS = [
    # tensorflow/core/common_runtime/gpu/gpu_device.cc, as contexts are made
    (E.InternalError, "cudaSetDevice() on GPU:0 failed. Status: initialization error", FaultOwner.NODE),
    (
        E.InternalError,
        "cudaSetDevice() on GPU:0 failed. Status: CUDA-capable device(s) is/are busy or unavailable",
        FaultOwner.NODE,
    ),
    (E.InternalError, "cudaSetDevice() on GPU:0 failed. Status: out of memory", FaultOwner.MEMORY),
    # tensorflow/core/common_runtime/copy_tensor.cc and eager/kernel_and_device.cc (tensorflow#7025)
    (E.InternalError, COPY.format("/job:localhost/replica:0/task:0/device:CPU:0", GPU), FaultOwner.MEMORY),
    # cudnn_graph.h, cudnnStatus_t
    (E.InternalError, CUDNN.format("CUDNN_STATUS_SUBLIBRARY_LOADING_FAILED"), FaultOwner.NODE),
    (E.InternalError, CUDNN.format("CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"), FaultOwner.MEMORY),
    # the user's names are no texts of TensorFlow's
    (
        E.InvalidArgumentError,
        "indices[0] = 5 is not in [0, 3) [[{{node functional_1/ECC_UNCORRECTABLE/GatherV2}}]]",
        None,
    ),
    (E.InvalidArgumentError, "indices[0] = 5 is not in [0, 3) [[{{node functional_1/xid/GatherV2}}]]", None),
    # tensorflow/core/common_runtime/base_collective_executor.cc, BaseCollectiveExecutor::CreateCollective
    (E.InternalError, INT32, FaultOwner.REFUSED),
    (E.InternalError, "CollectiveImplementation does not support datatype DT_UINT32", FaultOwner.REFUSED),
    # as above, bfloat16; issue tensorflow#56184 is about these
    (E.InternalError, INT32.replace("INT32", "BFLOAT16"), FaultOwner.REFUSED),
    # base_collective_executor.cc, StartAbort: what ranks see after one of them was refused
    (E.InternalError, ABORTED.format(INT32), FaultOwner.REFUSED),
    # tensorflow#48372, collective_param_resolver_local.cc of TensorFlow 2.5
    (
        E.InternalError,
        ABORTED.format(
            f"Collective Op CollectiveReduceV2: ReduceV2(Add,Id) is assigned to device {GPU} with type GPU and "
            "group_key 1 but that group has type DEFAULT"
        ),
        FaultOwner.REFUSED,
    ),
    # tensorflow#59888, collective_param_resolver_local.cc, CompleteGroupLocal
    (
        E.InternalError,
        ABORTED.format(f"Device {GPU} is joining a group with incompatible device typeCPU (group_key=3)"),
        FaultOwner.REFUSED,
    ),
    # nccl/src/init.cc, ncclGetErrorString(ncclInvalidUsage): two ranks on one GPU ("Duplicate GPU detected")
    (
        E.InternalError,
        "NCCL: invalid usage (run with NCCL_DEBUG=WARN for details). Set NCCL_DEBUG=WARN for detail.",
        FaultOwner.REFUSED,
    ),
    (
        E.InternalError,
        "NCCL: invalid argument (run with NCCL_DEBUG=WARN for details). Set NCCL_DEBUG=WARN for detail.",
        FaultOwner.REFUSED,
    ),
    # tensorflow/core/framework/op_kernel.cc and tensor.cc
    (E.ResourceExhaustedError, OOM, FaultOwner.MEMORY),
    # xla/tsl/framework/bfc_allocator.cc; xla's StreamExecutorMemoryAllocator
    (
        E.ResourceExhaustedError,
        "Out of memory while trying to allocate 3221225472 bytes. [Op:__inference_step_9]",
        FaultOwner.MEMORY,
    ),
    (
        E.ResourceExhaustedError,
        "Allocator (GPU_0_bfc) ran out of memory trying to allocate 3.46GiB (rounded to 3715170304)requested by op x",
        FaultOwner.MEMORY,
    ),
    # cuda_status.cc: CUDA_ERROR_OUT_OF_MEMORY becomes RESOURCE_EXHAUSTED
    (E.ResourceExhaustedError, "Failed to load module: CUDA_ERROR_OUT_OF_MEMORY: out of memory", FaultOwner.MEMORY),
    # xla/stream_executor/cuda/cuda_dnn.cc
    (E.ResourceExhaustedError, "CUDNN failed to allocate the scratch space for the runner", FaultOwner.MEMORY),
    # xla/tsl, an allocator of the host: a worker's own memory, as on a CPU
    (
        E.ResourceExhaustedError,
        "OOM when allocating tensor with shape[209715200,30] and type double on "
        "/job:localhost/replica:0/task:0/device:CPU:0 by allocator cpu",
        None,
    ),
    # cuda_status.cc with CUDA's descriptions
    (E.InternalError, ECC, FaultOwner.NODE),
    # xla/stream_executor/cuda/cuda_platform.cc, as TensorFlow 2.21 really writes it with a driver that fails
    (
        E.InternalError,
        "CUDA error: Failed call to cuInit: CUDA_ERROR_NO_DEVICE: no CUDA-capable device is detected",
        FaultOwner.NODE,
    ),
    (E.InternalError, "CUDA error: Failed call to cuInit: CUDA_ERROR_UNKNOWN: unknown error", FaultOwner.NODE),
    (
        E.InternalError,
        "CUDA error: Failed call to cuInit: CUDA_ERROR_SYSTEM_NOT_READY: system not yet initialized",
        FaultOwner.NODE,
    ),
    (
        E.InternalError,
        "CUDA error: Failed call to cuInit: CUDA_ERROR_SYSTEM_DRIVER_MISMATCH: system has unsupported display driver "
        "/ cuda driver combination",
        FaultOwner.NODE,
    ),
    (
        E.InternalError,
        "CUDA error: : CUDA_ERROR_NVLINK_UNCORRECTABLE: uncorrectable NVLink error detected during the execution",
        FaultOwner.NODE,
    ),
    # tensorflow/core/common_runtime/gpu/gpu_device.cc with CUDA's runtime
    (
        E.InternalError,
        "cudaGetDevice() failed. Status: all CUDA-capable devices are busy or unavailable",
        FaultOwner.NODE,
    ),
    (
        E.InternalError,
        "cudaGetDevice() failed. Status: CUDA driver version is insufficient for CUDA runtime version",
        FaultOwner.NODE,
    ),
    # NVML's NVML_ERROR_GPU_IS_LOST (nvml.h), as its error strings have it
    (
        E.InternalError,
        "GPU is lost: the GPU has fallen off the bus or has otherwise become inaccessible",
        FaultOwner.NODE,
    ),
    # xla/stream_executor/cuda/cuda_status.cc, of the runtime
    (
        E.InternalError,
        "CUDA Runtime error: Failed to get count: cudaErrorECCUncorrectable: uncorrectable ECC error encountered",
        FaultOwner.NODE,
    ),
    # tensorflow/core/util/autotune_maps, xla/stream_executor/stream_executor: the library does not start
    (
        E.FailedPreconditionError,
        "DNN library initialization failed. Look at the errors above for more details.",
        FaultOwner.NODE,
    ),
    (E.InternalError, "Failed to initialize BLAS support for GemmCmd", FaultOwner.NODE),
    # tensorflow/core/kernels/conv_ops of TensorFlow 2.4
    (
        E.UnknownError,
        "Failed to get convolution algorithm. This is probably because cuDNN failed to initialize, so try looking to "
        "see if a warning log message was printed above.",
        FaultOwner.NODE,
    ),
    # xla/stream_executor/cuda/cuda_dnn.cc
    (E.InternalError, CUDNN.format("CUDNN_STATUS_NOT_INITIALIZED"), FaultOwner.NODE),
    (
        E.InternalError,
        "Loaded runtime CuDNN library: 8.9.7 but source was compiled with: 9.3.0.  CuDNN library needs to have "
        "matching major version and equal or higher minor version.",
        FaultOwner.NODE,
    ),
    # tensorflow/core/nccl/nccl_manager.cc, NCCL_RETURN_IF_ERROR; nccl/src/init.cc, ncclGetErrorString
    (
        E.InternalError,
        "NCCL: unhandled system error (run with NCCL_DEBUG=INFO for details). Set NCCL_DEBUG=WARN for detail.",
        FaultOwner.NETWORK,
    ),
    (
        E.InternalError,
        "NCCL: unhandled cuda error (run with NCCL_DEBUG=INFO for details). Set NCCL_DEBUG=WARN for detail.",
        FaultOwner.NETWORK,
    ),
    (
        E.InternalError,
        "NCCL: internal error - please report this issue to the NCCL developers. Set NCCL_DEBUG=WARN for detail.",
        FaultOwner.NETWORK,
    ),
    (
        E.InternalError,
        "NCCL: remote process exited or there was a network error. Set NCCL_DEBUG=WARN for detail.",
        FaultOwner.PEER,
    ),
    # xla/stream_executor/cuda/cuda_driver.cc (LaunchKernel), cuda_status.cc
    (E.InternalError, ILLEGAL, FaultOwner.LAUNCH),
    (
        E.InternalError,
        "CUDA error: Could not synchronize CUDA stream: CUDA_ERROR_LAUNCH_FAILED: unspecified launch failure",
        FaultOwner.LAUNCH,
    ),
    (
        E.InternalError,
        "CUDA error: Failed to enqueue async memset operation: CUDA_ERROR_MISALIGNED_ADDRESS: misaligned address",
        FaultOwner.LAUNCH,
    ),
    (
        E.InternalError,
        "CUDA Runtime error: : cudaErrorIllegalAddress: an illegal memory access was encountered",
        FaultOwner.LAUNCH,
    ),
    # tensorflow/core/kernels/matmul_op_impl.h
    (
        E.InternalError,
        "Blas xGEMV launch failed : a.shape=[1,2010000,7], b.shape=[1,7,1], m=2010000, n=1, k=7",
        FaultOwner.LAUNCH,
    ),
    # tensorflow/core/kernels/fused_batch_norm_op.cc
    (E.InternalError, "cuDNN launch failure : input shape ([128,64,28,28])", FaultOwner.LAUNCH),
    # cuda_dnn.cc
    (E.InternalError, CUDNN.format("CUDNN_STATUS_EXECUTION_FAILED"), FaultOwner.LAUNCH),
    # tensorflow/core/kernels/conv_ops_gpu.h, BestCudnnConvAlgorithm
    (
        E.NotFoundError,
        "No algorithm worked!  Error messages:\n  Profiling failure on CUDNN engine 1",
        FaultOwner.LAUNCH,
    ),
    # What another rank says of its own GPU: this one has only lost it.
    (E.InternalError, f"[_Derived_]{ABORTED.format(ECC)}", FaultOwner.PEER),
    (E.InternalError, f"{ECC}{GRPC}", FaultOwner.PEER),
    # And what says nothing of a GPU: peers that die under gRPC, and the job's own errors.
    (E.UnavailableError, ABORTED.format("failed to connect to all addresses; last error: UNKNOWN"), None),
    (E.InternalError, f"Collective ops is aborted by: Socket closed{GRPC}", None),
    (E.InvalidArgumentError, "logits and labels must have the same first dimension, got [8,10] and [4]", None),
    (E.UnimplementedError, "Deterministic GPU implementation of unsorted segment reduction op not available.", None),
]


def load() -> StepLoad:
    return StepLoad(512, 8, ("NVIDIA L4", 23 << 30))


def explained(error: tf.errors.OpError, facts: FaultFacts) -> RaytfError | None:
    return explain(error, "Traceback", load, lambda: facts)


def ids() -> list[str]:
    return [f"{kind.__name__}-{text[:40]}" for kind, text, _ in TEXTS]


@pytest.mark.parametrize(("kind", "text", "whose"), TEXTS, ids=ids())
def test_whose_fault_a_text_is(kind, text, whose):
    assert sort(str(kind(None, None, text)), ALONE) is whose


RAISED = {
    FaultOwner.REFUSED: UnsupportedError,
    FaultOwner.MEMORY: JobError,
    FaultOwner.NODE: GpuError,
    FaultOwner.NETWORK: GpuError,
    FaultOwner.LAUNCH: GpuError,
    FaultOwner.PEER: WorkerLostError,
}


@pytest.mark.parametrize(("kind", "text", "whose"), TEXTS, ids=ids())
def test_what_a_worker_raises_for_it(kind, text, whose):
    """The way of a step's error: out of `worker.explained`, on this machine without NVML."""

    def step() -> None:
        raise kind(None, None, text)

    with pytest.raises(RaytfError) as found:
        worker.explained(TrainConfig.of(), step)
    if whose is None:
        assert not isinstance(found.value, (GpuError, UnsupportedError))
        return
    assert type(found.value) is RAISED[whose]
    assert "\n" not in str(found.value)
    assert (whose is FaultOwner.LAUNCH) == getattr(found.value, "is_launch", False)
    assert (whose is FaultOwner.NETWORK) == getattr(found.value, "is_doubtful", False)
    if whose is not FaultOwner.MEMORY:
        assert " ".join(text.split())[:100] in str(found.value)


@pytest.mark.parametrize(
    ("text", "facts", "whose"),
    [
        (OOM, SHARED, FaultOwner.TAKEN),
        (OOM, FaultFacts(others=None), FaultOwner.MEMORY),
        (OOM, FaultFacts(others=1, is_divided=True), FaultOwner.MEMORY),
        ("DNN library initialization failed.", SHARED, FaultOwner.TAKEN),
        (ILLEGAL, SHARED, FaultOwner.LAUNCH),
        (ILLEGAL, FaultFacts(elsewhere=True), FaultOwner.CODE),
        (ECC, FaultFacts(others=3, elsewhere=True), FaultOwner.NODE),
        (INT32, FaultFacts(others=3, elsewhere=True), FaultOwner.REFUSED),
        (OOM + GRPC, ALONE, FaultOwner.PEER),
        (OOM + GRPC, FaultFacts(is_told=True), FaultOwner.MEMORY),  # a coordinator, of a worker's GPU
        (ECC + GRPC, FaultFacts(is_told=True), FaultOwner.NODE),
    ],
)
def test_what_is_known_beside_the_text_counts(text, facts, whose):
    assert sort(text, facts) is whose


def test_a_worker_with_a_part_of_a_gpu_is_told_what_it_has():
    text = advise(OOM, StepLoad(64, 4, ("NVIDIA L4", 24 << 30), share=0.5))
    assert "the 12.0 GiB of this NVIDIA L4 that a worker has with --gpus-per-worker 0.5" in text
    assert "fewer workers on a GPU" in text


def test_another_process_on_the_gpu_is_a_fault_of_the_node():
    error = explained(E.ResourceExhaustedError(None, None, OOM), SHARED)
    assert isinstance(error, GpuError)
    assert error.retryable
    assert "another process is on the GPU" in str(error)


def test_a_lack_of_memory_says_which_flags_help_with_numbers():
    error = explained(E.ResourceExhaustedError(None, None, OOM), ALONE)
    assert isinstance(error, JobError)
    assert error.traceback == "Traceback"
    for part in (
        "a step of 64 records (--global-batch-size 512 in 8 logical shards)",
        "the 23.0 GiB of this NVIDIA L4",
        "512.0 MiB more could not be allocated",
        "--logical-shards 16, which computes 32 records",
        "--mixed-precision bfloat16",
        "shape[32,1024,64,64]",
    ):
        assert part in str(error)


def test_advice_offers_nothing_that_is_done_already():
    text = advise("out of memory while trying to allocate 5 bytes", StepLoad(8, 8, None, is_mixed=True))
    assert "--mixed-precision" not in text
    assert "--logical-shards" not in text


@pytest.mark.parametrize(
    ("text", "count"),
    [
        (OOM, 32 * 1024 * 64 * 64 * 4),
        ("OOM when allocating tensor with shape[] and type bfloat16 on x", 2),
        ("Out of memory while trying to allocate 3221225472 bytes.", 3221225472),
        ("Out of memory allocating 17 bytes.", 17),
        ("Allocator (GPU_0_bfc) ran out of memory trying to allocate 1.50GiB (rounded to 1)", 3 << 29),
        ("CUDA_ERROR_OUT_OF_MEMORY: out of memory", None),
    ],
)
def test_how_much_was_asked_for(text, count):
    assert asked_bytes(text) == count


def test_an_error_that_user_code_wrapped_is_sorted_as_well():
    def step() -> None:
        try:
            raise E.InternalError(None, None, ECC)
        except E.InternalError as error:
            raise JobError("the model function raised InternalError: ...") from error

    with pytest.raises(GpuError, match="ECC"):
        worker.explained(TrainConfig.of(), step)

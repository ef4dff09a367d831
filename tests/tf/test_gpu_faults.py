"""Errors about GPUs are each sorted right: real texts of TensorFlow, XLA, CUDA, cuDNN and NCCL, with their sources.

No GPU raised them here. The texts of TensorFlow and XLA are those that its wheel holds, put together as its sources do:
`cuda_status.cc` writes "CUDA error: WHAT: NAME: DESCRIPTION", `nccl_manager.cc` "NCCL: DESCRIPTION. Set NCCL_DEBUG=WARN
for detail.". Names and descriptions of CUDA's errors are those of cuGetErrorName and cuGetErrorString (CUDA Driver API,
section 6.1), of NCCL's those of ncclGetErrorString (nccl/src/init.cc).
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import tensorflow as tf

from raytf.config.train_config import TrainConfig
from raytf.distributed.gpu.faults import Facts, Load, Whose, advise, asked_bytes, sort
from raytf.errors import GpuError, JobError, RaytfError, UnsupportedError, WorkerLostError
from raytf.training import worker
from raytf.training.gpu_errors import explain

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
ALONE, SHARED = Facts(others=0), Facts(others=1)

COPY = "Failed copying input tensor from {0} to {1} in order to run _EagerConst: Dst tensor is not initialized."

#: Class, text, verdict where nothing else is on the GPU.
TEXTS = [
    # tensorflow/core/common_runtime/gpu/gpu_device.cc, as contexts are made
    (E.InternalError, "cudaSetDevice() on GPU:0 failed. Status: initialization error", Whose.NODE),
    (
        E.InternalError,
        "cudaSetDevice() on GPU:0 failed. Status: CUDA-capable device(s) is/are busy or unavailable",
        Whose.NODE,
    ),
    (E.InternalError, "cudaSetDevice() on GPU:0 failed. Status: out of memory", Whose.MEMORY),
    # tensorflow/core/common_runtime/copy_tensor.cc and eager/kernel_and_device.cc (tensorflow#7025)
    (E.InternalError, COPY.format("/job:localhost/replica:0/task:0/device:CPU:0", GPU), Whose.MEMORY),
    # cudnn_graph.h, cudnnStatus_t
    (E.InternalError, CUDNN.format("CUDNN_STATUS_SUBLIBRARY_LOADING_FAILED"), Whose.NODE),
    (E.InternalError, CUDNN.format("CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"), Whose.MEMORY),
    # the user's names are no texts of TensorFlow's
    (
        E.InvalidArgumentError,
        "indices[0] = 5 is not in [0, 3) [[{{node functional_1/ECC_UNCORRECTABLE/GatherV2}}]]",
        None,
    ),
    (E.InvalidArgumentError, "indices[0] = 5 is not in [0, 3) [[{{node functional_1/xid/GatherV2}}]]", None),
    # tensorflow/core/common_runtime/base_collective_executor.cc, BaseCollectiveExecutor::CreateCollective
    (E.InternalError, INT32, Whose.REFUSED),
    (E.InternalError, "CollectiveImplementation does not support datatype DT_UINT32", Whose.REFUSED),
    # as above, bfloat16; issue tensorflow#56184 is about these
    (E.InternalError, INT32.replace("INT32", "BFLOAT16"), Whose.REFUSED),
    # base_collective_executor.cc, StartAbort: what ranks see after one of them was refused
    (E.InternalError, ABORTED.format(INT32), Whose.REFUSED),
    # tensorflow#48372, collective_param_resolver_local.cc of TensorFlow 2.5
    (
        E.InternalError,
        ABORTED.format(
            f"Collective Op CollectiveReduceV2: ReduceV2(Add,Id) is assigned to device {GPU} with type GPU and "
            "group_key 1 but that group has type DEFAULT"
        ),
        Whose.REFUSED,
    ),
    # tensorflow#59888, collective_param_resolver_local.cc, CompleteGroupLocal
    (
        E.InternalError,
        ABORTED.format(f"Device {GPU} is joining a group with incompatible device typeCPU (group_key=3)"),
        Whose.REFUSED,
    ),
    # nccl/src/init.cc, ncclGetErrorString(ncclInvalidUsage): two ranks on one GPU ("Duplicate GPU detected")
    (
        E.InternalError,
        "NCCL: invalid usage (run with NCCL_DEBUG=WARN for details). Set NCCL_DEBUG=WARN for detail.",
        Whose.REFUSED,
    ),
    (
        E.InternalError,
        "NCCL: invalid argument (run with NCCL_DEBUG=WARN for details). Set NCCL_DEBUG=WARN for detail.",
        Whose.REFUSED,
    ),
    # tensorflow/core/framework/op_kernel.cc and tensor.cc
    (E.ResourceExhaustedError, OOM, Whose.MEMORY),
    # xla/tsl/framework/bfc_allocator.cc; xla's StreamExecutorMemoryAllocator
    (
        E.ResourceExhaustedError,
        "Out of memory while trying to allocate 3221225472 bytes. [Op:__inference_step_9]",
        Whose.MEMORY,
    ),
    (
        E.ResourceExhaustedError,
        "Allocator (GPU_0_bfc) ran out of memory trying to allocate 3.46GiB (rounded to 3715170304)requested by op x",
        Whose.MEMORY,
    ),
    # cuda_status.cc: CUDA_ERROR_OUT_OF_MEMORY becomes RESOURCE_EXHAUSTED
    (E.ResourceExhaustedError, "Failed to load module: CUDA_ERROR_OUT_OF_MEMORY: out of memory", Whose.MEMORY),
    # xla/stream_executor/cuda/cuda_dnn.cc
    (E.ResourceExhaustedError, "CUDNN failed to allocate the scratch space for the runner", Whose.MEMORY),
    # xla/tsl, an allocator of the host: a worker's own memory, as on a CPU
    (
        E.ResourceExhaustedError,
        "OOM when allocating tensor with shape[209715200,30] and type double on "
        "/job:localhost/replica:0/task:0/device:CPU:0 by allocator cpu",
        None,
    ),
    # cuda_status.cc with CUDA's descriptions
    (E.InternalError, ECC, Whose.NODE),
    # xla/stream_executor/cuda/cuda_platform.cc, as TensorFlow 2.21 really writes it with a driver that fails
    (
        E.InternalError,
        "CUDA error: Failed call to cuInit: CUDA_ERROR_NO_DEVICE: no CUDA-capable device is detected",
        Whose.NODE,
    ),
    (E.InternalError, "CUDA error: Failed call to cuInit: CUDA_ERROR_UNKNOWN: unknown error", Whose.NODE),
    (
        E.InternalError,
        "CUDA error: Failed call to cuInit: CUDA_ERROR_SYSTEM_NOT_READY: system not yet initialized",
        Whose.NODE,
    ),
    (
        E.InternalError,
        "CUDA error: Failed call to cuInit: CUDA_ERROR_SYSTEM_DRIVER_MISMATCH: system has unsupported display driver "
        "/ cuda driver combination",
        Whose.NODE,
    ),
    (
        E.InternalError,
        "CUDA error: : CUDA_ERROR_NVLINK_UNCORRECTABLE: uncorrectable NVLink error detected during the execution",
        Whose.NODE,
    ),
    # tensorflow/core/common_runtime/gpu/gpu_device.cc with CUDA's runtime
    (
        E.InternalError,
        "cudaGetDevice() failed. Status: all CUDA-capable devices are busy or unavailable",
        Whose.NODE,
    ),
    (
        E.InternalError,
        "cudaGetDevice() failed. Status: CUDA driver version is insufficient for CUDA runtime version",
        Whose.NODE,
    ),
    # NVML's NVML_ERROR_GPU_IS_LOST (nvml.h), as its error strings have it
    (E.InternalError, "GPU is lost: the GPU has fallen off the bus or has otherwise become inaccessible", Whose.NODE),
    # xla/stream_executor/cuda/cuda_status.cc, of the runtime
    (
        E.InternalError,
        "CUDA Runtime error: Failed to get count: cudaErrorECCUncorrectable: uncorrectable ECC error encountered",
        Whose.NODE,
    ),
    # tensorflow/core/util/autotune_maps, xla/stream_executor/stream_executor: the library does not start
    (
        E.FailedPreconditionError,
        "DNN library initialization failed. Look at the errors above for more details.",
        Whose.NODE,
    ),
    (E.InternalError, "Failed to initialize BLAS support for GemmCmd", Whose.NODE),
    # tensorflow/core/kernels/conv_ops of TensorFlow 2.4
    (
        E.UnknownError,
        "Failed to get convolution algorithm. This is probably because cuDNN failed to initialize, so try looking to "
        "see if a warning log message was printed above.",
        Whose.NODE,
    ),
    # xla/stream_executor/cuda/cuda_dnn.cc
    (E.InternalError, CUDNN.format("CUDNN_STATUS_NOT_INITIALIZED"), Whose.NODE),
    (
        E.InternalError,
        "Loaded runtime CuDNN library: 8.9.7 but source was compiled with: 9.3.0.  CuDNN library needs to have "
        "matching major version and equal or higher minor version.",
        Whose.NODE,
    ),
    # tensorflow/core/nccl/nccl_manager.cc, NCCL_RETURN_IF_ERROR; nccl/src/init.cc, ncclGetErrorString
    (
        E.InternalError,
        "NCCL: unhandled system error (run with NCCL_DEBUG=INFO for details). Set NCCL_DEBUG=WARN for detail.",
        Whose.NETWORK,
    ),
    (
        E.InternalError,
        "NCCL: unhandled cuda error (run with NCCL_DEBUG=INFO for details). Set NCCL_DEBUG=WARN for detail.",
        Whose.NETWORK,
    ),
    (
        E.InternalError,
        "NCCL: internal error - please report this issue to the NCCL developers. Set NCCL_DEBUG=WARN for detail.",
        Whose.NETWORK,
    ),
    (
        E.InternalError,
        "NCCL: remote process exited or there was a network error. Set NCCL_DEBUG=WARN for detail.",
        Whose.PEER,
    ),
    # xla/stream_executor/cuda/cuda_driver.cc (LaunchKernel), cuda_status.cc
    (E.InternalError, ILLEGAL, Whose.LAUNCH),
    (
        E.InternalError,
        "CUDA error: Could not synchronize CUDA stream: CUDA_ERROR_LAUNCH_FAILED: unspecified launch failure",
        Whose.LAUNCH,
    ),
    (
        E.InternalError,
        "CUDA error: Failed to enqueue async memset operation: CUDA_ERROR_MISALIGNED_ADDRESS: misaligned address",
        Whose.LAUNCH,
    ),
    (
        E.InternalError,
        "CUDA Runtime error: : cudaErrorIllegalAddress: an illegal memory access was encountered",
        Whose.LAUNCH,
    ),
    # tensorflow/core/kernels/matmul_op_impl.h
    (
        E.InternalError,
        "Blas xGEMV launch failed : a.shape=[1,2010000,7], b.shape=[1,7,1], m=2010000, n=1, k=7",
        Whose.LAUNCH,
    ),
    # tensorflow/core/kernels/fused_batch_norm_op.cc
    (E.InternalError, "cuDNN launch failure : input shape ([128,64,28,28])", Whose.LAUNCH),
    # cuda_dnn.cc
    (E.InternalError, CUDNN.format("CUDNN_STATUS_EXECUTION_FAILED"), Whose.LAUNCH),
    # tensorflow/core/kernels/conv_ops_gpu.h, BestCudnnConvAlgorithm
    (E.NotFoundError, "No algorithm worked!  Error messages:\n  Profiling failure on CUDNN engine 1", Whose.LAUNCH),
    # What another rank says of its own GPU: this one has only lost it.
    (E.InternalError, f"[_Derived_]{ABORTED.format(ECC)}", Whose.PEER),
    (E.InternalError, f"{ECC}{GRPC}", Whose.PEER),
    # And what says nothing of a GPU: peers that die under gRPC, and the job's own errors.
    (E.UnavailableError, ABORTED.format("failed to connect to all addresses; last error: UNKNOWN"), None),
    (E.InternalError, f"Collective ops is aborted by: Socket closed{GRPC}", None),
    (E.InvalidArgumentError, "logits and labels must have the same first dimension, got [8,10] and [4]", None),
    (E.UnimplementedError, "Deterministic GPU implementation of unsorted segment reduction op not available.", None),
]


def load() -> Load:
    return Load(512, 8, ("NVIDIA L4", 23 << 30))


def explained(error: tf.errors.OpError, facts: Facts) -> RaytfError | None:
    return explain(error, "Traceback", load, lambda: facts)


def ids() -> list[str]:
    return [f"{kind.__name__}-{text[:40]}" for kind, text, _ in TEXTS]


@pytest.mark.parametrize(("kind", "text", "whose"), TEXTS, ids=ids())
def test_whose_fault_a_text_is(kind, text, whose):
    assert sort(str(kind(None, None, text)), ALONE) is whose


RAISED = {
    Whose.REFUSED: UnsupportedError,
    Whose.MEMORY: JobError,
    Whose.NODE: GpuError,
    Whose.NETWORK: GpuError,
    Whose.LAUNCH: GpuError,
    Whose.PEER: WorkerLostError,
}


@pytest.mark.parametrize(("kind", "text", "whose"), TEXTS, ids=ids())
def test_what_a_worker_raises_for_it(kind, text, whose):
    """The way of a step's error: out of `worker.explained`, on this machine without NVML."""

    def step() -> None:
        raise kind(None, None, text)

    job = SimpleNamespace(config=TrainConfig.of())
    with pytest.raises(RaytfError) as found:
        worker.explained(job, step)
    if whose is None:
        assert not isinstance(found.value, (GpuError, UnsupportedError))
        return
    assert type(found.value) is RAISED[whose]
    assert "\n" not in str(found.value)
    assert (whose is Whose.LAUNCH) == getattr(found.value, "is_launch", False)
    assert (whose is Whose.NETWORK) == getattr(found.value, "is_doubtful", False)
    if whose is not Whose.MEMORY:
        assert " ".join(text.split())[:100] in str(found.value)


@pytest.mark.parametrize(
    ("text", "facts", "whose"),
    [
        (OOM, SHARED, Whose.TAKEN),
        (OOM, Facts(others=None), Whose.MEMORY),
        (OOM, Facts(others=1, is_divided=True), Whose.MEMORY),
        ("DNN library initialization failed.", SHARED, Whose.TAKEN),
        (ILLEGAL, SHARED, Whose.LAUNCH),
        (ILLEGAL, Facts(elsewhere=True), Whose.CODE),
        (ECC, Facts(others=3, elsewhere=True), Whose.NODE),
        (INT32, Facts(others=3, elsewhere=True), Whose.REFUSED),
        (OOM + GRPC, ALONE, Whose.PEER),
        (OOM + GRPC, Facts(is_told=True), Whose.MEMORY),  # a coordinator, of a worker's GPU
        (ECC + GRPC, Facts(is_told=True), Whose.NODE),
    ],
)
def test_what_is_known_beside_the_text_counts(text, facts, whose):
    assert sort(text, facts) is whose


def test_a_worker_with_a_part_of_a_gpu_is_told_what_it_has():
    text = advise(OOM, Load(64, 4, ("NVIDIA L4", 24 << 30), share=0.5))
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
        "512.0 MiB more could not be had",
        "--logical-shards 16, which computes 32 records",
        "--mixed-precision bfloat16",
        "shape[32,1024,64,64]",
    ):
        assert part in str(error)


def test_advice_offers_nothing_that_is_done_already():
    text = advise("out of memory while trying to allocate 5 bytes", Load(8, 8, None, is_mixed=True))
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
        worker.explained(SimpleNamespace(config=TrainConfig.of()), step)

"""Finds the causes of TensorFlow's errors about GPUs from their texts. This module loads no TensorFlow.

The texts are those of TensorFlow 2.21, CUDA 12, cuDNN 9 and NCCL 2; tests/tf/test_gpu_faults.py has one of each kind
with its source. An error whose text matches none of them is not about a GPU, and is handled as on CPUs.
"""

from __future__ import annotations

import enum
import math
import re
from dataclasses import dataclass

from raytf.errors import one_line


class FaultOwner(enum.Enum):
    """The party that has to fix an error."""

    REFUSED = "TensorFlow or NCCL does not support this on these devices, so a retry fails, too"
    MEMORY = "the job needs more memory than the GPU has"
    CODE = "the job's code makes kernels fail, on every GPU"
    TAKEN = "another process uses the GPU"
    NODE = "the node's GPU, its driver or its libraries fail"
    NETWORK = "NCCL fails, because of this node or of another one that it communicates with"
    LAUNCH = "a kernel failed, because of the node's GPU or of the code"
    PEER = "another rank disappeared or failed"


@dataclass(frozen=True)
class FaultFacts:
    """Facts in addition to an error's text.

    Attributes:
        others: how many other processes use the GPU; None if it is not known.
        is_divided: the run itself puts several workers on a GPU.
        elsewhere: kernels have failed on another node before.
        is_told: this process has no GPU, and only receives errors about the GPUs of other processes.
    """

    others: int | None = None
    is_divided: bool = False
    elsewhere: bool = False
    is_told: bool = False


def _any(*texts: str) -> re.Pattern[str]:
    return re.compile("|".join(texts), re.IGNORECASE)


#: The error is not about this rank's own GPU: TensorFlow passes on the error that stopped another rank.
_PASSED_ON = _any(r"\[_Derived_\]", "from remote target", "Collective ops is aborted by")
#: Parts of an error that contain the user's names: of operations, and of lines of code.
_NAMES = re.compile(r"\[\[.*?\]\]|\{\{.*?\}\}|Detected at node .*?(?=\n|$)|node: ?'[^']*'")
_REFUSED = _any(
    r"does not support datatype",
    r"CollectiveImplementation does not support",
    r"does not support\b.* on DEVICE_GPU",
    r"is assigned to device",
    r"is joining a group with incompatible device type",
    r"NCCL version \d+ does not support",
    r"expected data types compatible with NCCL",
    r"NCCL: invalid (argument|usage)",
    r"Duplicate GPU detected",
)
_PEER = _any(r"NCCL: remote process exited", r"NCCL: NCCL operation in progress", r"NCCL communicator .*abort")
_NETWORK = _any(r"NCCL: unhandled (system|cuda) error", r"NCCL: internal error", r"Error invoking NCCL")
_HOST = _any(r"by allocator (mkl_?)?cpu\b", r"device:CPU:\d+ by allocator")
_MEMORY = _any(
    r"OOM when allocating",
    r"ran out of memory trying to allocate",
    r"ran out of memory when allocating",
    r"out of memory (while trying to allocate|allocating)",
    r"memory while trying to allocate",
    r"CUDA_ERROR_OUT_OF_MEMORY|cudaErrorMemoryAllocation",
    r"cuMemAllocAsync failed to allocate",
    r"(CUDNN|CUBLAS|CUSOLVER|CUSPARSE|CUFFT)_(STATUS_)?ALLOC_FAILED",
    r"CUDNN failed to allocate the scratch space",
    r"Failed to allocate memory for convolution redzone",
    r"cuda[SG]etDevice\(\).* failed\. Status: out of memory",
    r"Dst tensor is not initialized",  # there was no memory for a copy to the device
    r"CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
)
#: Messages of libraries that cannot start, as also happens on a full GPU.
_STARTING = _any(
    r"initialize cublas may be due to OOM",
    r"failed to create cublas handle",
    r"Failed to create cuBlas instance",
    r"Failed to create cuSolverDN instance",
    r"DNN library initialization failed",
    r"Failed to initialize (DNN|BLAS|BLASLT) support",
    r"Could not create cudnn handle",
    r"cudnn library could not create a handle",
    r"cuDNN failed to initialize",
    r"CU(DNN|BLAS|SOLVER)_STATUS_NOT_INITIALIZED",
    r"CUDNN_STATUS_INTERNAL_ERROR\b",
)
_NODE = _any(
    r"CUDA_ERROR_ECC_UNCORRECTABLE|uncorrectable ECC error",
    r"CUDA_ERROR_NVLINK_UNCORRECTABLE|uncorrectable NVLink error",
    r"CUDA_ERROR_CONTAINED|CUDA_ERROR_HARDWARE_STACK_ERROR",
    r"cudaError(ECCUncorrectable|NoDevice|DevicesUnavailable|InsufficientDriver|InitializationError|Unknown)\b",
    r"GPU is lost|f[ae]ll(en)? off the bus",
    r"cuda[SG]etDevice\(\).* failed\. Status: (?!out of memory)",
    r"CUDA_ERROR_(NO_DEVICE|DEVICE_UNAVAILABLE|DEVICE_NOT_LICENSED|NOT_INITIALIZED|DEINITIALIZED|UNKNOWN)\b",
    r"CUDA_ERROR_(OPERATING_SYSTEM|SYSTEM_NOT_READY|SYSTEM_DRIVER_MISMATCH|EXTERNAL_DEVICE)\b",
    r"CUDA_ERROR_(INVALID_DEVICE|STUB_LIBRARY|COMPAT_NOT_SUPPORTED_ON_DEVICE|MPS_\w+)\b",
    r"no CUDA-capable device is detected",
    r"CUDA driver version is insufficient",
    r"CUDA-capable device(s|\(s\))? (is/)?are busy or unavailable|no kernel image is available",
    r"CUDA_ERROR_NO_BINARY_FOR_GPU|CUDA_ERROR_UNSUPPORTED_PTX_VERSION",
    r"failed call to cuInit",
    r"Failed to initialize GPU device #",
    r"Loaded runtime CuDNN library",
    r"CUDNN_STATUS_(ARCH_MISMATCH|RUNTIME_PREREQUISITE_MISSING|LICENSE_ERROR|(SUB)?LIBRARY_VERSION_MISMATCH)",
    r"CUDNN_STATUS_(SUB)?LIBRARY_LOADING_FAILED",
)
_LAUNCH = _any(
    r"CUDA_ERROR_(ILLEGAL_ADDRESS|MISALIGNED_ADDRESS|INVALID_ADDRESS_SPACE|INVALID_PC|ILLEGAL_INSTRUCTION)\b",
    r"CUDA_ERROR_(LAUNCH_FAILED|LAUNCH_TIMEOUT|LAUNCH_OUT_OF_RESOURCES|ASSERT|INVALID_HANDLE|INVALID_VALUE)\b",
    r"cudaError(IllegalAddress|MisalignedAddress|InvalidAddressSpace|InvalidPc|IllegalInstruction)\b",
    r"cudaError(LaunchFailure|LaunchTimeout|LaunchOutOfResources|Assert|InvalidValue|InvalidConfiguration)\b",
    r"illegal memory access was encountered",
    r"unspecified launch failure",
    r"device-side assert triggered",
    r"Failed to launch CUDA kernel",
    r"Failed to load in-memory CUBIN",
    r"(Blas \w+|cuBlas \w+|cuDNN) launch (failed|failure)",
    r"failed BLAS call|cuBlas call failed|cuSolverDN call failed",
    r"CU(DNN|BLAS|SOLVER|SPARSE)_STATUS_(EXECUTION_FAILED|MAPPING_ERROR)",
    r"CUBLAS_STATUS_INTERNAL_ERROR",
    r"Could not synchronize CUDA stream|Failed to block host until done",
    r"Failed to enqueue async memset operation",
    r"No algorithm worked!",
)


def sort(text: str, facts: FaultFacts) -> FaultOwner | None:
    """Return who has to fix an error of TensorFlow, judged by its text; None if it is not about a GPU."""
    text = _NAMES.sub("", text)
    if _REFUSED.search(text):
        return FaultOwner.REFUSED
    own = _of_own(text, facts)
    return FaultOwner.PEER if own is not None and not facts.is_told and _PASSED_ON.search(text) else own


def _of_own(text: str, facts: FaultFacts) -> FaultOwner | None:
    is_shared = bool(facts.others) and not facts.is_divided
    if _PEER.search(text):
        return FaultOwner.PEER
    if _NODE.search(text):
        return FaultOwner.NODE
    if _NETWORK.search(text):
        return FaultOwner.NETWORK
    if _MEMORY.search(text):
        return None if _HOST.search(text) else FaultOwner.TAKEN if is_shared else FaultOwner.MEMORY
    if _STARTING.search(text):
        return FaultOwner.TAKEN if is_shared else FaultOwner.NODE
    if _LAUNCH.search(text):
        return FaultOwner.CODE if facts.elsewhere else FaultOwner.LAUNCH
    return None


#: Bytes of an element, by the dtype names in TensorFlow's errors.
_BYTES = {"float": 4, "double": 8, "half": 2, "bfloat16": 2, "int32": 4, "int64": 8, "uint32": 4, "uint64": 8}
_SHAPE = re.compile(r"tensor (?:with|of) shape ?\[([\d,]*)\] and type (\w+)")
_ASKED = re.compile(r"allocat(?:e|ing) (\d+) ?(?:bytes|B\b)|allocat(?:e|ing) ([\d.]+) ?([KMGT])iB")


def asked_bytes(text: str) -> int | None:
    """Return how many bytes could not be allocated, according to an error; None if it has no number."""
    shape = _SHAPE.search(text)
    if shape:
        return math.prod(int(n) for n in shape[1].split(",") if n) * _BYTES.get(shape[2], 1)
    asked = _ASKED.search(text)
    if not asked:
        return None
    return int(asked[1]) if asked[1] else int(float(asked[2]) * 2 ** (10 * (1 + "KMGT".index(asked[3]))))


@dataclass(frozen=True)
class StepLoad:
    """The load that a step puts on a GPU.

    Attributes:
        batch: records in a global batch.
        shards: logical shards that the batch is split into.
        gpu: name and bytes of the GPU; None if they are not known.
        is_mixed: the model already computes with numbers of 16 bits.
        share: the part of the GPU that is assigned to this worker.
    """

    batch: int
    shards: int
    gpu: tuple[str, int] | None = None
    is_mixed: bool = False
    share: float = 1.0


def advise(text: str, load: StepLoad) -> str:
    """Return advice for a user whose model needs more memory than the GPU has."""
    asked = asked_bytes(text)
    lacking = f"{asked / 2**20:,.1f} MiB more could not be allocated" if asked else "no more memory could be allocated"
    gpu = f"the {load.gpu[1] * load.share / 2**30:.1f} GiB of this {load.gpu[0]}" if load.gpu else "the GPU's memory"
    gpu += f" that a worker has with --gpus-per-worker {load.share:g}" if load.share < 1 else ""
    records = -(-load.batch // load.shards)
    fixes = [] if load.is_mixed else ["--mixed-precision bfloat16"]
    if records > 1:
        more, fewer = 2 * load.shards, max(1, records // 2)
        fixes.append(f"for a new run, --logical-shards {more}, which computes {fewer} records at a time")
        fixes.append(f"for a new run, --global-batch-size below {load.batch}")
    fixes += ["fewer workers on a GPU (--gpus-per-worker)"] * (load.share < 1)
    fixes.append("a GPU with more memory")
    return (
        f"the model and a step of {records} records (--global-batch-size {load.batch} in {load.shards} logical shards) "
        f"do not fit into {gpu}: {lacking}. Use one of: {'; '.join(fixes)}. TensorFlow: {one_line(text, 300)}"
    )

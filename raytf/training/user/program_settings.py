"""Process-wide settings of Keras and TensorFlow that a program has made, for the processes that train its model.

The dtype policy and the default float are in `raytf.config.precision`, since a flag may contradict them.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field
from typing import Any

from raytf import _tensorflow
from raytf.errors import ConfigError

#: TensorFlow's options when nobody sets any.
_OPTIONS = {"disable_model_pruning": False, "disable_meta_optimizer": False}


@dataclass(frozen=True)
class ProgramSettings:
    """A program's settings of its process that workers take over; the defaults are those of Keras and TensorFlow.

    Attributes:
        epsilon: of `keras.config.set_epsilon`.
        image_data_format: of `keras.config.set_image_data_format`.
        numpy_behavior: whether NumPy behavior is enabled in TensorFlow.
        prefers_float32: with NumPy behavior, whether Python's floats are float32.
        filters_tracebacks: whether Keras, and whether TensorFlow, shorten tracebacks.
        is_interactive: whether Keras prints what it logs.
        jit: whether TensorFlow compiles graphs with XLA, as `tf.config.optimizer.set_jit` says.
        optimizer_options: of `tf.config.optimizer.set_experimental_options`.
        soft_placement: whether an operation may run on another device than it was given.
        tf32: whether GPUs may multiply with TensorFloat-32.
    """

    epsilon: float = 1e-7
    image_data_format: str = "channels_last"
    numpy_behavior: bool = False
    prefers_float32: bool = False
    filters_tracebacks: tuple[bool, bool] = (True, True)
    is_interactive: bool = True
    jit: bool = False
    optimizer_options: dict[str, bool] = field(default_factory=lambda: dict(_OPTIONS))
    soft_placement: bool = True
    tf32: bool = True

    def identity(self) -> dict[str, str]:
        """Return what must not change when a run is resumed; nothing for the defaults, as for runs made before."""
        default = ProgramSettings()
        texts = {
            "keras.config.epsilon()": (self.epsilon, default.epsilon),
            "keras.config.image_data_format()": (self.image_data_format, default.image_data_format),
            "NumPy behavior": (self.numpy_behavior, default.numpy_behavior),
        }
        return {name: str(value) for name, (value, usual) in texts.items() if value != usual}

    def apply(self) -> None:
        """Set them in this process, where nothing was computed yet."""
        import keras
        import tensorflow as tf

        keras.config.set_epsilon(self.epsilon)
        keras.config.set_image_data_format(self.image_data_format)
        if self.numpy_behavior:
            tf.experimental.numpy.experimental_enable_numpy_behavior(prefer_float32=self.prefers_float32)
        if not self.filters_tracebacks[0]:
            keras.config.disable_traceback_filtering()
        if not self.filters_tracebacks[1]:
            tf.debugging.disable_traceback_filtering()
        if not self.is_interactive:
            keras.config.disable_interactive_logging()
        if self.jit:
            tf.config.optimizer.set_jit("autoclustering")
        if self.optimizer_options != _OPTIONS:
            tf.config.optimizer.set_experimental_options(self.optimizer_options)
        if not self.soft_placement:
            tf.config.set_soft_device_placement(False)
        if not self.tf32:
            tf.config.experimental.enable_tensor_float_32_execution(False)


def of_process() -> ProgramSettings | None:
    """Return what is set in this process; None where nobody has loaded Keras: workers then keep their own
    configuration."""
    keras: Any = sys.modules.get("keras")
    tf: Any = sys.modules.get("tensorflow")
    if not hasattr(keras, "config") or not hasattr(tf, "config"):
        return None
    numpy = _tensorflow.numpy_behavior()
    return ProgramSettings(
        keras.config.epsilon(),
        keras.config.image_data_format(),
        numpy is not None,
        numpy is not None and numpy[0],
        (keras.config.is_traceback_filtering_enabled(), tf.debugging.is_traceback_filtering_enabled()),
        keras.config.is_interactive_logging_enabled(),
        bool(tf.config.optimizer.get_jit()),
        dict(tf.config.optimizer.get_experimental_options()),
        tf.config.get_soft_device_placement(),
        tf.config.experimental.tensor_float_32_execution_enabled(),
    )


def check() -> list[str]:
    """Refuse settings of this process that workers cannot have.

    Returns:
        Lines about settings that change nothing of what is learned, and that workers leave out.

    Raises:
        ConfigError: names the setting, and what to do.
    """
    keras: Any = sys.modules.get("keras")
    backend = keras.config.backend() if hasattr(keras, "config") else "tensorflow"
    asked = os.environ.get("KERAS_BACKEND") or backend
    other = next((name for name in (backend, asked) if name != "tensorflow"), None)
    if other is not None:
        raise ConfigError(
            f"the program asks for Keras's backend {other!r}, and raytf trains with TensorFlow. Leave KERAS_BACKEND "
            "out, or set it to tensorflow before Keras is imported."
        )
    tf: Any = sys.modules.get("tensorflow")
    if not hasattr(tf, "config"):
        return []
    numpy = _tensorflow.numpy_behavior()
    if numpy is not None and numpy[1] not in ("off", "legacy"):
        raise ConfigError(
            f"NumPy behavior is enabled with dtype_conversion_mode={numpy[1]!r}, which would change the arithmetic of "
            "the workers' own sums. Leave dtype_conversion_mode out, and cast where dtypes differ."
        )
    lines = []
    if tf.config.functions_run_eagerly():
        lines.append("tf.config.run_functions_eagerly(True) is for this process: workers trace the step anyway")
    threading = tf.config.threading
    if threading.get_intra_op_parallelism_threads() or threading.get_inter_op_parallelism_threads():
        lines.append("tf.config.threading is for this process: workers have as many threads as --cpus-per-worker says")
    return lines

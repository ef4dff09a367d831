"""A program's process-wide Keras and TensorFlow settings, which the processes that train its model take over.

The dtype policy and the default float are in `raytf.config.precision`, since a flag may contradict them.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field
from typing import Any

from raytf import _tensorflow
from raytf.errors import ConfigError

#: TensorFlow's default optimizer options.
_OPTIONS = {"disable_model_pruning": False, "disable_meta_optimizer": False}


@dataclass(frozen=True)
class ProgramSettings:
    """A program's process-wide settings that workers take over. Defaults are the defaults of Keras and TensorFlow.

    Attributes:
        epsilon: as set by `keras.config.set_epsilon`.
        image_data_format: as set by `keras.config.set_image_data_format`.
        numpy_behavior: whether NumPy behavior is enabled in TensorFlow.
        prefers_float32: with NumPy behavior, whether Python's floats are float32.
        filters_tracebacks: whether Keras shortens tracebacks, and whether TensorFlow does.
        is_interactive: whether Keras prints its logs instead of logging them.
        jit: whether TensorFlow compiles graphs with XLA, as set by `tf.config.optimizer.set_jit`.
        optimizer_options: as set by `tf.config.optimizer.set_experimental_options`.
        soft_placement: whether an operation may run on a different device than the one it was assigned.
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
        """Return the settings that must not change when a run resumes, without defaults: older runs recorded none."""
        default = ProgramSettings()
        texts = {
            "keras.config.epsilon()": (self.epsilon, default.epsilon),
            "keras.config.image_data_format()": (self.image_data_format, default.image_data_format),
            "NumPy behavior": (self.numpy_behavior, default.numpy_behavior),
        }
        return {name: str(value) for name, (value, usual) in texts.items() if value != usual}

    def apply(self) -> None:
        """Apply the settings to this process, which must not have computed anything yet."""
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
    """Return the settings of this process; None if Keras is not loaded, so workers keep their own configuration."""
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
    """Raise an error for a setting of this process that workers cannot take over.

    Returns:
        Lines about settings that workers ignore because they do not change what the model learns.

    Raises:
        ConfigError: workers cannot take over a setting; the message names it and what to do.
    """
    keras: Any = sys.modules.get("keras")
    backend = keras.config.backend() if hasattr(keras, "config") else "tensorflow"
    asked = os.environ.get("KERAS_BACKEND") or backend
    other = next((name for name in (backend, asked) if name != "tensorflow"), None)
    if other is not None:
        raise ConfigError(
            f"the program selects Keras's backend {other!r}, but raytf trains with TensorFlow. Unset KERAS_BACKEND, "
            "or set it to tensorflow before Keras is imported."
        )
    tf: Any = sys.modules.get("tensorflow")
    if not hasattr(tf, "config"):
        return []
    numpy = _tensorflow.numpy_behavior()
    if numpy is not None and numpy[1] not in ("off", "legacy"):
        raise ConfigError(
            f"NumPy behavior is enabled with dtype_conversion_mode={numpy[1]!r}, which would change how the workers "
            "compute their own sums. Omit dtype_conversion_mode, and cast where dtypes differ."
        )
    lines = []
    if tf.config.functions_run_eagerly():
        lines.append("tf.config.run_functions_eagerly(True) affects only this process: workers trace the step anyway")
    threading = tf.config.threading
    if threading.get_intra_op_parallelism_threads() or threading.get_inter_op_parallelism_threads():
        lines.append("tf.config.threading affects only this process: set --cpus-per-worker for the workers' threads")
    return lines

"""A small language model on a text file: it learns letter by letter, and writes a line at the end.

    python jobs/transformer_text.py                                 # on the manual that comes with Python
    python jobs/transformer_text.py --text shakespeare.txt --context 128 --epochs 20
    ray job submit --working-dir . -- python jobs/transformer_text.py --workers 1:4 --layers 6 --width 512

Shows layers of one's own, several targets in a record, and a callback that uses the model: a causal transformer over
bytes, so that no tokenizer has to be fitted. The text is cut into pieces of `--context` bytes; each byte is foretold
from those before it in its piece. Every tenth piece is kept for validation.

Expect the perplexity (e to the loss: among how many bytes the model hesitates) to fall in every epoch. A model that
knows nothing has 256; after 1, 2, 4 and 6 epochs it has 13.7, 10.8, 6.6 and 4.8 on text that it was not trained on, and
writes words, half of which exist.
"""

from dataclasses import dataclass, field

import raytf


@dataclass(frozen=True)
class Job:
    """Train a small transformer to continue text."""

    text: str = "manual"
    """A text file, or manual: what Python's help() knows about the language, which comes with every Python."""
    context: int = 64
    """Bytes that the model sees at once."""
    width: int = 64
    """Numbers that stand for each byte."""
    layers: int = 2
    """Blocks of an attention and a hidden layer."""
    heads: int = 4
    """Heads of each attention, which share the width."""
    dropout: float = 0.0
    """Share of each block's output that a step leaves out."""
    learning_rate: float = 3e-3
    """Adam's learning rate."""
    prompt: str = "The "
    """What the line at the end begins with."""
    train: raytf.Flags = field(default_factory=raytf.TrainConfig)


def read(job: Job):
    """(training pieces, validation pieces) of the text, each a tuple of bytes and of the bytes that follow them."""
    import numpy as np

    if job.text == "manual":
        from pydoc_data.topics import topics

        data = "\n\n".join(topics[name] for name in sorted(topics)).encode()
    else:
        try:
            with open(job.text, "rb") as file:
                data = file.read()
        except OSError as error:
            raise raytf.DataError(f"--text {job.text}: {error.strerror}. Give a text file, or manual.") from error
    pieces = (len(data) - 1) // job.context
    if pieces < 20:
        raise raytf.DataError(f"--text {job.text} has {len(data)} bytes. Expected at least {20 * job.context + 1}.")
    codes = np.frombuffer(data, np.uint8)[: pieces * job.context + 1].astype(np.int32)
    x, y = codes[:-1].reshape(pieces, -1), codes[1:].reshape(pieces, -1)
    kept = np.arange(pieces) % 10 == 9
    return (x[~kept], y[~kept]), (x[kept], y[kept])


def build(job: Job):
    import keras
    from keras import layers

    class Positions(layers.Layer):
        """Adds to each byte what tells its place."""

        def build(self, shape):
            self.table = self.add_weight(shape=(job.context, job.width), initializer="random_normal")

        def call(self, inputs):
            return inputs + self.table[: keras.ops.shape(inputs)[1]]

    inputs = keras.Input((None,), dtype="int32")
    x = Positions()(layers.Embedding(256, job.width)(inputs))
    for _ in range(job.layers):
        normal = layers.LayerNormalization()(x)
        attention = layers.MultiHeadAttention(job.heads, job.width // job.heads)
        x += layers.Dropout(job.dropout)(attention(normal, normal, use_causal_mask=True))
        hidden = layers.Dense(4 * job.width, activation="gelu")(layers.LayerNormalization()(x))
        x += layers.Dropout(job.dropout)(layers.Dense(job.width)(hidden))
    model = keras.Model(inputs, layers.Dense(256)(layers.LayerNormalization()(x)))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(job.learning_rate, global_clipnorm=1.0), loss)
    return model


def writer(job: Job):
    import keras
    import numpy as np

    class Writer(keras.callbacks.Callback):
        """Says at the end how the model continues the prompt."""

        def on_train_end(self, logs=None):
            random, text = np.random.default_rng(job.train.batch.seed), list(job.prompt.encode() or b"\n")
            for _ in range(76):
                scores = np.asarray(self.model(np.array([text[-job.context :]], np.int32)))[0, -1].astype(float)
                chances = np.exp((scores - scores.max()) / 0.5)  # a temperature: below 1, it dares less
                text.append(int(random.choice(256, p=chances / chances.sum())))
            print("it writes:", " ".join(bytes(text).decode(errors="replace").split()))

    return Writer()


def main(job: Job) -> None:
    import math

    if min(job.context, job.width, job.layers, job.heads) < 1 or job.width % job.heads:
        raise raytf.ConfigError(
            "--context, --width, --layers, --heads: expected 1 or more, and a width that heads divide."
        )
    if not 0 <= job.dropout < 1:
        raise raytf.ConfigError(f"--dropout {job.dropout}: expected a number from 0 to below 1.")
    train, validation = read(job)
    print(f"text: {job.text}, {len(train[0])} training and {len(validation[0])} validation pieces", flush=True)
    result = raytf.fit(
        lambda: build(job),
        train,
        validation=validation,
        callbacks=lambda files: [writer(job)],
        config=job.train.lasting(epochs=4),
    )
    print("epoch  training perplexity  validation perplexity")
    for row in result.document["history"]:
        losses = row["loss"], row.get("val_loss", math.nan)
        print(f"{row['epoch'] + 1:>5}  {math.exp(losses[0]):>19.2f}  {math.exp(losses[1]):>21.2f}")


if __name__ == "__main__":
    raytf.cli(main)

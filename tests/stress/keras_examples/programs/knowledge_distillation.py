"""Stands for keras.io/examples/vision/knowledge_distillation: compute_loss that asks a trained teacher; three fits."""

import keras
import numpy as np
from keras import layers, ops

keras.utils.set_random_seed(1)

CLASSES = 4

labels = np.random.randint(0, CLASSES, 304)
images = np.random.uniform(0, 0.4, (304, 8, 8, 1)).astype("float32")
for image, label in zip(images, labels, strict=True):
    image[2 * label : 2 * label + 2] += 0.6
x_train, y_train, x_test, y_test = images[:240], labels[:240], images[240:], labels[240:]


class Distiller(keras.Model):
    def __init__(self, student, teacher):
        super().__init__()
        self.student, self.teacher = student, teacher

    def compile(self, optimizer, metrics, student_loss_fn, distillation_loss_fn, alpha=0.1, temperature=3):
        super().compile(optimizer=optimizer, metrics=metrics)
        self.student_loss_fn, self.distillation_loss_fn = student_loss_fn, distillation_loss_fn
        self.alpha, self.temperature = alpha, temperature

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, allow_empty=False):
        taught = ops.softmax(self.teacher(x, training=False) / self.temperature, axis=1)
        learned = ops.softmax(y_pred / self.temperature, axis=1)
        distillation_loss = self.distillation_loss_fn(taught, learned) * self.temperature**2
        return self.alpha * self.student_loss_fn(y, y_pred) + (1 - self.alpha) * distillation_loss

    def call(self, x):
        return self.student(x)


def make_network(first, second, name):
    x = [keras.Input(shape=(8, 8, 1)), layers.Conv2D(first, 3, strides=2, padding="same"), layers.LeakyReLU()]
    x = [*x, layers.MaxPooling2D(2, strides=1, padding="same"), layers.Conv2D(second, 3, strides=2, padding="same")]
    return keras.Sequential([*x, layers.Flatten(), layers.Dense(CLASSES)], name=name)


teacher = make_network(12, 16, "teacher")
student = make_network(3, 4, "student")
student_scratch = keras.models.clone_model(student)
fitting = {"batch_size": 16, "epochs": 2, "shuffle": False, "verbose": 0}


def compiled(network):
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    network.compile(optimizer="adam", loss=loss, metrics=[keras.metrics.SparseCategoricalAccuracy()])
    return network


taught = compiled(teacher).fit(x_train, y_train, **fitting)
teacher.evaluate(x_test, y_test, verbose=0)

distiller = Distiller(student=student, teacher=teacher)
distiller.compile(
    optimizer=keras.optimizers.Adam(),
    metrics=[keras.metrics.SparseCategoricalAccuracy()],
    student_loss_fn=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    distillation_loss_fn=keras.losses.KLDivergence(),
    alpha=0.1,
    temperature=10,
)
distilled = distiller.fit(x_train, y_train, **fitting)
distiller.evaluate(x_test, y_test, verbose=0)

scratch = compiled(student_scratch).fit(x_train, y_train, **fitting)
student_scratch.evaluate(x_test, y_test, verbose=0)

for history in (taught, distilled, scratch):
    print(history.history)

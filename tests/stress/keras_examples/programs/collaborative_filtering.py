"""Stands for keras.io/examples/structured_data/collaborative_filtering_for_movielens: embeddings and biases only."""

import keras
import numpy as np
from keras import layers, ops

keras.utils.set_random_seed(1)

USERS, MOVIES, RATINGS = 30, 50, 320

pairs = np.stack([np.random.randint(0, USERS, RATINGS), np.random.randint(0, MOVIES, RATINGS)], axis=1)
stars = (pairs.sum(axis=1) % 10 + 1) / 2
y = (stars - stars.min()) / (stars.max() - stars.min())
count = int(0.9 * RATINGS)
x_train, x_val, y_train, y_val = pairs[:count], pairs[count:], y[:count], y[count:]


class RecommenderNet(keras.Model):
    def __init__(self, users, movies, size, **kwargs):
        super().__init__(**kwargs)
        options = {"embeddings_initializer": "he_normal", "embeddings_regularizer": keras.regularizers.l2(1e-6)}
        self.user_embedding = layers.Embedding(users, size, **options)
        self.user_bias = layers.Embedding(users, 1)
        self.movie_embedding = layers.Embedding(movies, size, **options)
        self.movie_bias = layers.Embedding(movies, 1)

    def call(self, inputs):
        users, movies = inputs[:, 0], inputs[:, 1]
        # As on the page, the product sums over the records of the batch too.
        product = ops.tensordot(self.user_embedding(users), self.movie_embedding(movies), 2)
        return ops.sigmoid(product + self.user_bias(users) + self.movie_bias(movies))


model = RecommenderNet(USERS, MOVIES, 6)
model.compile(loss=keras.losses.BinaryCrossentropy(), optimizer=keras.optimizers.Adam(learning_rate=0.001))
history = model.fit(
    x=x_train, y=y_train, batch_size=16, epochs=2, validation_data=(x_val, y_val), shuffle=False, verbose=0
)

seen = set(x_train[x_train[:, 0] == 3][:, 1])
unseen = [movie for movie in range(MOVIES) if movie not in seen]
ratings = model.predict(np.array([[3, movie] for movie in unseen]), verbose=0).flatten()
top = [unseen[n] for n in ratings.argsort()[-5:][::-1]]
assert len(top) == 5
print(history.history)

# The image for heads, with Google's library for TPUs and JAX; build raytf-cpu first:
#     docker build -f cluster-configs/docker/tpu.Dockerfile --build-arg CPU_IMAGE=your-registry/raytf-cpu:0.1.0 \
#         -t your-registry/raytf-tpu:0.1.0 .
# JAX, since tensorflow-tpu and the TensorFlow that raytf needs exclude each other: a job for TPUs brings its own loop.
ARG CPU_IMAGE=raytf-cpu:0.1.0
FROM ${CPU_IMAGE}

USER root
RUN pip install --no-cache-dir -c constraints.txt 'jax[tpu]'
USER ray

# raytf for heads and CPU workers; build it in the root of the checkout:
#     docker build -f cluster-configs/docker/cpu.Dockerfile -t your-registry/raytf-cpu:0.1.0 .
# The same Python in both images and on the machine that submits: Ray refuses another patch level.
FROM python:3.11.7-slim-bookworm

# git and wget are asked for by Ray's probes and runtime environments; rsync by `ray rsync`; procps by `ray stop`.
RUN apt-get update \
    && apt-get install -y --no-install-recommends git procps rsync wget \
    && rm -rf /var/lib/apt/lists/*


# The operator's own pods and hostPath volumes expect this user, as in Ray's images.
RUN useradd --uid 1000 --create-home ray && mkdir -p /mnt/raytf && chown ray /mnt/raytf
WORKDIR /home/ray/raytf

# The large part first, so that a change of the code does not fetch it again.
COPY LICENSE constraints.txt pyproject.toml ./
COPY raytf/__init__.py raytf/
RUN pip install --no-cache-dir -c constraints.txt '.[all]' && pip uninstall -y raytf-train

COPY raytf raytf
COPY jobs jobs
RUN pip install --no-cache-dir --no-deps . && chown -R ray .

USER ray
ENV RAY_USAGE_STATS_ENABLED=0

# An image for KubeRay: Ray with its dashboard, which jobs and KubeRay's health probes use.
#
#     docker build -f launchers/ray.Dockerfile -t roll:cuda-vllm-ray .
# hadolint ignore=DL3006
ARG IMAGE=roll:cuda-vllm
FROM ${IMAGE}
RUN uv pip install "ray[default]==2.60.0"
# KubeRay may start Ray in a login shell, which resets PATH.
USER 0
RUN echo "PATH=$PATH" > /etc/profile.d/roll.sh
USER 1000

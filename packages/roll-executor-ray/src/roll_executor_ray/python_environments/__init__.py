"""Python environments of roles: found or built on each worker's host, and checked before a worker starts there.

EnvironmentSpec -> prepare() -> interpreter
                     | with `packages`: `packages.build`, which uses uv and caches by digest
                     | otherwise: the interpreter that `python` names
"""

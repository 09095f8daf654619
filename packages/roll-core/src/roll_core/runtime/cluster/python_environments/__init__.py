"""Python environments of roles: found or made on the host of each worker, and checked before a worker starts there.

EnvironmentSpec -> prepare() -> interpreter
                     | a set of packages: `packages.build`, with uv, kept by its digest
                     | otherwise: the interpreter that is named
"""

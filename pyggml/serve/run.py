"""Run the application by uvicorn until a signal ends it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from pyggml.errors import ModelError
from pyggml.llm.model import Model

from . import create_app, needs_extra
from .options import ListenOptions, Preset, ServeOptions

# Seconds for which a Python thread has its turn: 5 ms, Python's own, are ten steps of a small model.
_SWITCH = 1e-3
_CUT = 2  # seconds that clients have to take the ends of answers that were cut


def run(
    load: Callable[[str | None], Model],
    options: ServeOptions,
    listen: ListenOptions,
    verbose: bool = False,
    presets: Mapping[str, Preset] | None = None,
) -> None:
    """Serve a model, or several, until SIGTERM or Ctrl-C ends it. No further requests are taken then, and answers under
    way have `stop_seconds` to end before they are cut; a second signal cuts them at once. `load` loads a model by its
    path (None: the only one); `presets`: see `create_app`. Raises ModelError when a package is missing."""
    try:
        import uvicorn

        from .connection import Connection, Server, until_cut
    except ImportError as e:
        raise needs_extra(e) from None
    _check_tls(listen)
    model = load(None) if options.models_dir is None and presets is None else None
    app = create_app(model, options, load, presets)

    uds = listen.host if listen.host.endswith(".sock") else None
    where: dict[str, Any] = {"uds": uds} if uds else {"host": listen.host, "port": listen.port}
    if listen.ssl_key_file is not None:
        where |= {"ssl_keyfile": listen.ssl_key_file, "ssl_certfile": listen.ssl_cert_file}
    config = uvicorn.Config(
        until_cut(app),
        **where,
        http=Connection,
        ws="none",
        lifespan="on",
        log_level="info" if verbose else "warning",
        access_log=verbose,
        server_header=False,
        timeout_graceful_shutdown=listen.stop_seconds + _CUT,
    )
    scheme = "http" if listen.ssl_key_file is None else "https"
    at = (
        uds
        or f"{scheme}://{f'[{listen.host}]' if ':' in listen.host else listen.host}:{listen.port}{options.api_prefix}"
    )
    named = [name for name in presets or () if name != "*"]
    what = ", ".join(filter(None, (options.models_dir, *named))) if model is None else model.path
    print(f"pyggml serves {what} at {at}", file=sys.stderr, flush=True)
    sys.setswitchinterval(_SWITCH)
    Server(config, options.timeout, listen.stop_seconds, app.state.cut).run()


def _check_tls(listen: ListenOptions) -> None:
    """Look at the key and the certificate before a model is loaded. Raises ModelError when one is missing, or when they
    do not belong together, and OSError for a file that cannot be read. Errors name the files; OpenSSL's do not."""
    key, cert = listen.ssl_key_file, listen.ssl_cert_file
    if key is None and cert is None:
        return
    if key is None or cert is None:
        raise ModelError("TLS needs both --ssl-key-file and --ssl-cert-file")
    import ssl

    def password() -> NoReturn:
        raise ModelError(f"{key}: a key with a password; openssl pkey -in FILE -out OTHER makes one without")

    for path in (key, cert):
        with open(path, "rb"):
            pass
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(cert, key, password)
    except ssl.SSLError as e:
        raise ModelError(f"{key} and {cert}: not a private key and its certificate (PEM): {e.reason}") from None

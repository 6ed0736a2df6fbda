"""An S3 server on this machine that writes a line for each request: method, path, bytes sent.

python s3_server.py PORT_FILE LOG_FILE
"""

import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import make_server

Environ = dict[str, object]
Answer = Callable[..., object]


class Counting:
    """Passes requests on, and counts the bytes of the answers."""

    def __init__(self, log: str) -> None:
        self._app = DomainDispatcherApplication(create_backend_app)
        self._log = log

    def __call__(self, environ: Environ, start: Answer) -> Iterator[bytes]:
        sent = 0
        body: Iterable[bytes] = self._app(environ, start)
        for part in body:
            sent += len(part)
            yield part
        method, path = environ["REQUEST_METHOD"], environ["PATH_INFO"]
        query = environ.get("QUERY_STRING", "")
        with open(self._log, "a", encoding="utf-8") as log:
            log.write(f"{method} {path} {sent} {'list' if 'list-type' in str(query) else '-'}\n")


def main() -> None:
    """Serve until killed."""
    port_file, log = sys.argv[1:]
    server = make_server("127.0.0.1", 0, Counting(log), threaded=True)
    Path(port_file).write_text(str(server.port), encoding="utf-8")
    server.serve_forever()


if __name__ == "__main__":
    main()

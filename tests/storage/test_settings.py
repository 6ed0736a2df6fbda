"""The usual settings of stores: each is found, and used for a request to a server of our own."""

from __future__ import annotations

import json
import os
import ssl
import subprocess
import sys
from base64 import urlsafe_b64decode
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from hashlib import sha1
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import ClassVar

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import padding, rsa
from cryptography.x509.oid import NameOID

from ckpt_tools.errors import UsageError
from ckpt_tools.storage import fsspec_store, object_store, paths
from ckpt_tools.storage.reader import Files

pytest.importorskip("obstore")
DATA = b"0123456789"
KEYS = {"accessKeyId": "TEMPORARY", "secretAccessKey": "s", "sessionToken": "t"}
ROLE = """<AssumeRoleResponse><AssumeRoleResult><Credentials>
<AccessKeyId>TEMPORARY</AccessKeyId><SecretAccessKey>s</SecretAccessKey>
<SessionToken>t</SessionToken><Expiration>2099-01-01T00:00:00Z</Expiration>
</Credentials></AssumeRoleResult></AssumeRoleResponse>"""


class Server(BaseHTTPRequestHandler):
    """Every store, with objects that are all ``DATA``; and who lends credentials of AWS."""

    protocol_version = "HTTP/1.1"
    asked: ClassVar[list[tuple[str, str]]] = []
    tls: ClassVar[ssl.SSLContext]

    def do_GET(self) -> None:
        if self.path.startswith("/federation/credentials"):
            expiry = 4_070_908_800_000
            self._answer(200, json.dumps({"roleCredentials": {**KEYS, "expiration": expiry}}))
            return
        self.asked.append((self.path, self.headers.get("Authorization", "")))
        self._answer(206, DATA.decode()[2:7])

    def do_CONNECT(self) -> None:
        """A proxy, and the server of that name behind it."""
        self.send_response(200)
        self.end_headers()
        self.connection = self.tls.wrap_socket(self.connection, server_side=True)
        self.rfile, self.wfile = self.connection.makefile("rb"), self.connection.makefile("wb", 0)
        self.close_connection = False

    def finish(self) -> None:
        super().finish()
        self.connection.close()  # the socket that the server knows has been given up for it

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self._answer(200, ROLE)

    def _answer(self, status: int, body: str) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Content-Range", f"bytes 2-6/{len(DATA)}")
        self.send_header("ETag", '"one"')
        self.send_header("Last-Modified", "Wed, 21 Oct 2015 07:28:00 GMT")
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, *_: object) -> None:
        """Nothing is printed."""


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[str]:
    """The address of that server; nothing is set yet, and the home is empty."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Server)
    Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    for name in [name for name in os.environ if name.startswith(("AWS_", "GOOGLE_", "AZURE_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    fsspec_store._protocol.cache_clear()
    Server.asked = []
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    fsspec_store._protocol.cache_clear()


def request(address: str) -> tuple[str, str]:
    """Path and authorization of the request for a part of an object."""
    with Files() as files:
        assert files.read(address, 2, 5) == DATA[2:7]
    (asked,) = Server.asked
    return asked


def write_aws(folder: Path, text: str) -> None:
    (folder / ".aws").mkdir()
    (folder / ".aws" / "config").write_text(text)


def test_keys_of_s3_in_path_style(here: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", here)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "MINE")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "s")
    monkeypatch.setenv("AWS_REGION", "eu-west-3")
    path, authorization = request("s3://bucket/run/x")
    assert path == "/bucket/run/x"
    assert "Credential=MINE/" in authorization
    assert "/eu-west-3/s3/" in authorization


def test_a_public_bucket_gets_no_signature(here: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", here)
    monkeypatch.setenv("AWS_SKIP_SIGNATURE", "true")
    assert request("s3://bucket/x") == ("/bucket/x", "")


def test_s3_through_a_proxy(here: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://store.invalid")
    monkeypatch.setenv("AWS_SKIP_SIGNATURE", "true")
    monkeypatch.setenv("HTTP_PROXY", here)
    assert request("s3://bucket/x") == ("http://store.invalid/bucket/x", "")


def test_a_role_of_a_profile(here: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("boto3")
    write_aws(
        tmp_path,
        "[profile base]\naws_access_key_id = k\naws_secret_access_key = s\n"
        "[profile lab]\nrole_arn = arn:aws:iam::1:role/reader\nsource_profile = base\n"
        "region = eu-west-1\n",
    )
    monkeypatch.setenv("AWS_PROFILE", "lab")
    monkeypatch.setenv("AWS_ENDPOINT_URL", here)
    assert "Credential=TEMPORARY/" in request("s3://bucket/x")[1]


def test_single_sign_on(here: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("boto3")
    start = "https://lab.awsapps.com/start"
    write_aws(
        tmp_path,
        f"[default]\nsso_start_url = {start}\nsso_region = eu-west-1\nregion = eu-west-1\n"
        "sso_account_id = 1\nsso_role_name = reader\n",
    )
    token = tmp_path / ".aws" / "sso" / "cache" / f"{sha1(start.encode()).hexdigest()}.json"  # noqa: S324 (as aws names it)
    token.parent.mkdir(parents=True)
    token.write_text(json.dumps({"accessToken": "t", "expiresAt": "2099-01-01T00:00:00Z"}))
    monkeypatch.setenv("AWS_ENDPOINT_URL", here)
    # In a new process: where tokens lie is known once botocore is imported.
    read = "from ckpt_tools.storage.reader import Files; Files().read('s3://bucket/x', 2, 5)"
    subprocess.run([sys.executable, "-c", read], check=True)
    assert "Credential=TEMPORARY/" in Server.asked[0][1]


@pytest.fixture(scope="module")
def key() -> rsa.RSAPrivateKey:
    return rsa.generate_private_key(65537, 2048)


def pem(key: rsa.RSAPrivateKey) -> str:
    no_password = serialization.NoEncryption()
    kinds = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    return key.private_bytes(*kinds, no_password).decode()


def account(folder: Path, key: rsa.RSAPrivateKey, **more: str) -> str:
    """The path of a service account's key file, as Google's console gives it."""
    facts = {"type": "service_account", "client_email": "me@lab", "private_key_id": "1"}
    (folder / "account.json").write_text(json.dumps({**facts, "private_key": pem(key), **more}))
    return str(folder / "account.json")


def issuer(authorization: str, key: rsa.RSAPrivateKey) -> object:
    """Who has signed the token of a request, with this key and for Google's storage."""
    kind, _, token = authorization.partition(" ")
    signed, _, signature = token.rpartition(".")
    head, claims = (json.loads(urlsafe_b64decode(f"{part}==")) for part in signed.split("."))
    assert (kind, head["alg"]) == ("Bearer", "RS256")
    assert claims["scope"] == "https://www.googleapis.com/auth/cloud-platform"
    scheme = padding.PKCS1v15(), hashes.SHA256()
    key.public_key().verify(urlsafe_b64decode(f"{signature}=="), signed.encode(), *scheme)
    return claims["iss"]


def test_a_service_account_of_google(
    here: str, key: rsa.RSAPrivateKey, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its file may name another server, which is asked here."""
    monkeypatch.setenv("GOOGLE_SERVICE_ACCOUNT", account(tmp_path, key, gcs_base_url=here))
    client = object_store._client(here)
    monkeypatch.setattr(object_store, "_client", lambda _: client)  # no http of Google's
    path, authorization = request("gs://bucket/x")
    assert path == "/bucket/x"
    assert issuer(authorization, key) == "me@lab"


def test_google_application_credentials_through_a_proxy_with_an_authority_of_its_own(
    here: str, key: rsa.RSAPrivateKey, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """They are always for Google's own server: a proxy stands here for it."""
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "storage.googleapis.com")])
    made, now = (
        x509.CertificateBuilder(subject_name=name, issuer_name=name),
        datetime.now(timezone.utc),
    )
    made = made.public_key(key.public_key()).serial_number(x509.random_serial_number())
    made = made.not_valid_before(now - timedelta(1)).not_valid_after(now + timedelta(1))
    names = x509.SubjectAlternativeName([x509.DNSName("storage.googleapis.com")])
    certificate = made.add_extension(names, critical=False).sign(key, hashes.SHA256())
    authority = tmp_path / "authority.pem"
    authority.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    (tmp_path / "key.pem").write_text(pem(key))
    as_google = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    as_google.load_cert_chain(authority, tmp_path / "key.pem")
    monkeypatch.setattr(Server, "tls", as_google, raising=False)
    monkeypatch.setenv("HTTPS_PROXY", here)
    monkeypatch.setenv("SSL_CERT_FILE", str(authority))
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", account(tmp_path, key))
    path, authorization = request("gs://bucket/x")
    assert path == "/bucket/x"
    assert issuer(authorization, key) == "me@lab"


def test_google_application_credentials_that_are_none(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "wrong.json").write_text("{}")
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path / "wrong.json"))
    fsspec_store._protocol.cache_clear()
    with pytest.raises(UsageError, match=r"gs://bucket cannot be opened: .*decode"):
        paths.size("gs://bucket/x")


def test_a_key_of_azure(here: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "me")
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", "c2VjcmV0")
    monkeypatch.setenv("AZURE_STORAGE_ENDPOINT", here)
    path, authorization = request("az://container/x")
    assert path == "/container/x"
    assert authorization.startswith("SharedKey me:")

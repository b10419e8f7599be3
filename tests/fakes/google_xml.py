"""Google's XML API in front of fake-gcs-server, which speaks the JSON API; obstore speaks XML alone.

Objects, their generations, hashes and listings are the server's; here is the translation.  Parts of an
unfinished upload are kept here, as they are invisible in a bucket.
"""

from __future__ import annotations

import http.client
import itertools
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, quote, unquote, urlencode, urlsplit
from xml.etree import ElementTree
from xml.sax.saxutils import escape

PAGE = 200
ERRORS = {404: "NoSuchKey", 416: "InvalidRange"}


class GoogleXml:
    """``endpoint`` is what a store is told; ``server`` is the port of fake-gcs-server."""

    def __init__(self, server: int) -> None:
        self.server = server
        self.uploads: dict[str, dict[int, bytes]] = {}
        self.numbers = itertools.count(1)
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
        self._http.daemon_threads = True
        self._http.front = self  # type: ignore[attr-defined]
        self.port = int(self._http.server_address[1])
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def stop(self) -> None:
        self._http.shutdown()
        self._http.server_close()

    def ask(
        self, method: str, path: str, body: bytes = b"", headers: dict[str, str] | None = None, **query: Any
    ) -> tuple[int, dict[str, str], bytes]:
        """One request of the JSON API: status, headers and body."""
        connection = http.client.HTTPConnection("127.0.0.1", self.server, timeout=60)
        try:
            target = path + ("?" + urlencode(query) if query else "")
            connection.request(method, target, body or None, headers or {})
            response = connection.getresponse()
            return (
                response.status,
                {name.lower(): value for name, value in response.getheaders()},
                response.read(),
            )
        finally:
            connection.close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: Any

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def _serve(self) -> None:
        parts = urlsplit(self.path)
        self.bucket, _, self.key = unquote(parts.path).lstrip("/").partition("/")
        self.query = {
            name: values[0] for name, values in parse_qs(parts.query, keep_blank_values=True).items()
        }
        self.body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.front: GoogleXml = self.server.front
        if "Bearer" not in self.headers.get("Authorization", "Bearer"):
            self._refuse(401, "AuthenticationRequired")
        elif not self.key:
            self._list()
        elif self.command in ("PUT", "POST") or "uploadId" in self.query:
            self._upload()
        elif self.command == "DELETE":
            status, _, _ = self.front.ask("DELETE", self._object)
            self._refuse(status, "NoSuchKey") if status >= 400 else self._answer(204)
        else:
            self._download()

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _serve  # noqa: N815 - what the library looks for

    @property
    def _object(self) -> str:
        return f"/storage/v1/b/{quote(self.bucket)}/o/{quote(self.key, safe='')}"

    def _download(self) -> None:
        sent = {"Range": self.headers["Range"]} if "Range" in self.headers else {}
        path = "/download" + self._object
        status, headers, body = self.front.ask("GET", path, headers=sent, alt="media")
        if status >= 400:
            self._refuse(status, ERRORS.get(status, "Error"))
            return
        names = ("etag", "last-modified", "content-range", "x-goog-generation", "content-type")
        self._answer(status, body, {name: headers[name] for name in names if name in headers})

    def _upload(self) -> None:
        front, upload = self.front, self.query.get("uploadId", "")
        if "uploads" in self.query:
            upload = f"upload-{next(front.numbers)}"
            if self._bucket_there():
                front.uploads[upload] = {}
                self._xml("InitiateMultipartUploadResult", f"<UploadId>{upload}</UploadId>")
        elif upload and upload not in front.uploads:
            self._refuse(404, "NoSuchUpload")
        elif self.command == "DELETE":
            del front.uploads[upload]
            self._answer(204)
        elif "partNumber" in self.query:
            front.uploads[upload][int(self.query["partNumber"])] = self.body
            self._answer(200, headers={"etag": f'"{len(self.body)}-{self.query["partNumber"]}"'})
        elif upload:
            named = [
                int(one.text or 0)
                for one in ElementTree.fromstring(self.body).iter()
                if one.tag.endswith("PartNumber")
            ]
            parts = front.uploads[upload]
            if sorted(named) != sorted(parts):
                self._refuse(400, "InvalidPart")
            elif (made := self._put(b"".join(parts[number] for number in named))) is not None:
                del front.uploads[upload]
                self._xml("CompleteMultipartUploadResult", f"<ETag>{made['etag']}</ETag>", made)
        elif (made := self._put(self.body)) is not None:
            self._answer(200, headers=made)

    def _put(self, data: bytes) -> dict[str, str] | None:
        """Store an object; the headers that tell of it, or None after an error was sent."""
        path = f"/upload/storage/v1/b/{quote(self.bucket)}/o"
        headers = {"Content-Type": "application/octet-stream", "Content-Length": str(len(data))}
        status, _, body = self.front.ask("POST", path, data, headers, uploadType="media", name=self.key)
        if status >= 400:
            self._refuse(status, "NoSuchBucket")
            return None
        made = json.loads(body)
        return {"etag": f'"{made["etag"].strip(chr(34))}"', "x-goog-generation": str(made["generation"])}

    def _list(self) -> None:
        after = self.query.get("start-after", "")
        asked = {
            "prefix": self.query.get("prefix", ""), "startOffset": after, "maxResults": PAGE,
            "pageToken": self.query.get("continuation-token", ""),
        }  # fmt: skip
        path = f"/storage/v1/b/{quote(self.bucket)}/o"
        status, _, body = self.front.ask(
            "GET", path, **{name: value for name, value in asked.items() if value}
        )
        if status >= 400 or not self._bucket_there():
            if status >= 400:
                self._refuse(status, "NoSuchBucket")
            return
        found = json.loads(body)
        items = "".join(
            f"<Contents><Key>{escape(one['name'])}</Key><Size>{one['size']}</Size>"
            f"<LastModified>{one['updated']}</LastModified><ETag>{escape(one['etag'])}</ETag></Contents>"
            for one in found.get("items", [])
            if one["name"] != after
        )
        token = found.get("nextPageToken", "")
        more = f"<NextContinuationToken>{escape(token)}</NextContinuationToken>" if token else ""
        self._xml("ListBucketResult", f"<Name>{self.bucket}</Name>{more}{items}")

    def _bucket_there(self) -> bool:
        """Whether the bucket is; the refusal is sent where it is not."""
        if self.front.ask("GET", f"/storage/v1/b/{quote(self.bucket)}")[0] == 200:
            return True
        self._refuse(404, "NoSuchBucket")
        return False

    def _xml(self, name: str, inner: str, headers: dict[str, str] | None = None) -> None:
        body = f'<?xml version="1.0" encoding="UTF-8"?><{name}>{inner}</{name}>'.encode()
        self._answer(200, body, {"content-type": "application/xml", **(headers or {})})

    def _refuse(self, status: int, code: str) -> None:
        if (
            status == 404
            and code == "NoSuchKey"
            and self.front.ask("GET", f"/storage/v1/b/{quote(self.bucket)}")[0] != 200
        ):
            code = "NoSuchBucket"
        body = f'<?xml version="1.0" encoding="UTF-8"?><Error><Code>{code}</Code></Error>'.encode()
        self._answer(status, body, {"content-type": "application/xml"})

    def _answer(self, status: int, body: bytes = b"", headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

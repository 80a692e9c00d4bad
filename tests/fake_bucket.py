"""A stand-in for Google Cloud Storage, in memory, whose roles can say no.

It answers what gcsfs, tensorstore and google-cloud-storage ask for while a run saves, resumes and
copies its files. A test that wants to kill a run in the middle of a save has the bucket `hold` an
upload: the answer never comes.
"""

import base64
import email
import functools
import hashlib
import http.server
import json
import re
import sys
import threading
import time
from urllib.parse import parse_qsl, quote, unquote, urlsplit

# What Google's roles allow, as far as these programs ask:
# https://cloud.google.com/storage/docs/access-control/iam-roles
ROLES = {
    "roles/storage.objectViewer": {"storage.objects.get", "storage.objects.list"},
    "roles/storage.legacyBucketReader": {"storage.buckets.get", "storage.objects.list"},
    "roles/storage.objectAdmin": {
        f"storage.objects.{verb}" for verb in ("create", "delete", "get", "list", "update")
    },
}
BOTH = ("roles/storage.objectAdmin", "roles/storage.legacyBucketReader")


class Refused(Exception):
    """An answer other than 200: the HTTP code and a message."""


class Server(http.server.ThreadingHTTPServer):
    """Prints nothing if a client is killed."""

    daemon_threads, request_queue_size = True, 100

    def handle_error(self, request, client_address):
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


class FakeBucket:
    """A server with buckets in it; `variables` lead Google's libraries to it.

    Attributes:
        roles: the roles of the account that asks, by bucket. objects: (content, generation) by
        bucket and name. asked: the calls so far. held: set once an upload has been held.
    """

    def __init__(self):
        self.roles, self.objects, self.asked = {}, {}, []
        self.lock, self.generation, self.parts = threading.RLock(), 0, {}
        self._hold, self.held, self._released = "", threading.Event(), threading.Event()
        handler = type("Bound", (Handler,), {"fake": self})
        self.server = Server(("127.0.0.1", 0), handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        self.variables = {
            "STORAGE_EMULATOR_HOST": self.url,  # gcsfs and google-cloud-storage
            "TENSORSTORE_GCS_HTTP_URL": self.url,
            "GOOGLE_AUTH_TOKEN_FOR_TESTING": "nobody",  # tensorstore
            # gcsfs would ask by gRPC, which this doesn't speak, what kind of bucket it is
            "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",
        }

    def make(self, name, roles=BOTH):
        """A new, empty bucket; returns its address."""
        self.roles[name] = roles
        return f"gs://{name}"

    def names(self, address):
        """The objects below an address such as gs://bucket/folder, without it."""
        bucket, _, prefix = address.removeprefix("gs://").partition("/")
        with self.lock:
            there = [name for where, name in self.objects if where == bucket]
        return sorted(
            name.removeprefix(prefix).lstrip("/") for name in there if name.startswith(prefix)
        )

    def hold(self, pattern):
        """Leaves uploads whose name matches unanswered and unwritten, until `release`."""
        self.held.clear()
        self._released.clear()
        self._hold = pattern

    def release(self):
        """The uploads that were held get a 503, if anybody is still there; later ones pass."""
        self._hold = ""
        self._released.set()

    def need(self, bucket, permission):
        """Raises Refused unless the account's roles on the bucket allow it."""
        if bucket not in self.roles:
            raise Refused(404, "The specified bucket does not exist.")
        if permission not in set().union(*(ROLES[role] for role in self.roles[bucket])):
            raise Refused(403, f"nobody@example.com does not have {permission} access to it.")

    def put(self, bucket, name, content, query=None):
        """Writes an object and returns its metadata."""
        if self._hold and re.search(self._hold, name):
            self.held.set()
            self._released.wait()
            raise Refused(503, "held")
        self.need(bucket, "storage.objects.create")
        with self.lock:
            old = self.objects.get((bucket, name))
            if old:  # Google calls it so: to overwrite is to delete
                self.need(bucket, "storage.objects.delete")
            wanted = (query or {}).get("ifGenerationMatch")
            if wanted is not None and int(wanted) != (old[1] if old else 0):
                raise Refused(412, "conditionNotMet")
            self.generation += 1
            self.objects[bucket, name] = content, self.generation
        return self.metadata(bucket, name)

    def find(self, bucket, name):
        """Content and generation of an object."""
        with self.lock:
            if (bucket, name) not in self.objects:
                raise Refused(404, f"No such object: {bucket}/{name}")
            return self.objects[bucket, name]

    def metadata(self, bucket, name):
        content, generation = self.find(bucket, name)
        now = time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime())
        return {
            "kind": "storage#object",
            "bucket": bucket,
            "name": name,
            "size": str(len(content)),
            "generation": str(generation),
            "metageneration": "1",
            "md5Hash": base64.b64encode(hashlib.md5(content).digest()).decode(),
            "timeCreated": now,
            "updated": now,
        }


class Handler(http.server.BaseHTTPRequestHandler):
    """One connection of a client."""

    protocol_version = "HTTP/1.1"
    wbufsize = 2**16  # header and body in one packet: the second would wait 40 ms
    fake: FakeBucket

    def log_message(self, *args):
        pass

    def answer(self):
        url, code, headers = urlsplit(self.path), 200, {}
        query, body = dict(parse_qsl(url.query, keep_blank_values=True)), self.body()
        self.fake.asked.append(f"{self.command} {unquote(self.path)}")
        try:
            for pattern, call in CALLS.items():
                if found := re.fullmatch(pattern, f"{self.command} {url.path}"):
                    found = {key: unquote(text) for key, text in found.groupdict().items()}
                    answer = call(self, query=query, body=body, **found)
                    break
            else:
                raise Refused(404, f"the stand-in does not know {self.command} {self.path}")
        except Refused as refused:
            code, message = refused.args
            answer = {"error": {"code": code, "message": message}}
        if isinstance(answer, tuple):
            code, headers, answer = answer
        content = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        self.send_response(code)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    do_GET = do_POST = do_PUT = do_DELETE = answer

    def body(self):
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        content = b""
        while size := int(self.rfile.readline(), 16):
            content += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return content

    def upload(self, bucket, query, body):
        """The three ways to upload: the content alone, beside its metadata, in several requests."""
        kind = query.get("uploadType")
        if kind == "multipart":
            described, content = parts_of(self.headers["Content-Type"], body)
            return self.fake.put(bucket, json.loads(described)["name"], content, query)
        if kind == "media":
            return self.fake.put(bucket, query["name"], body, query)
        if "upload_id" not in query:
            name = quote(json.loads(body)["name"], safe="")
            place = (
                f"{self.fake.url}{urlsplit(self.path).path}?uploadType=resumable&upload_id={name}"
            )
            return 200, {"Location": place}, {}
        name = query["upload_id"]
        self.fake.parts[name] = self.fake.parts.get(name, b"") + body
        if self.headers.get("Content-Range", "").endswith("/*"):  # more is to come
            return 308, {"Range": f"bytes=0-{len(self.fake.parts[name]) - 1}"}, b""
        return self.fake.put(bucket, name, self.fake.parts.pop(name), query)

    def copy(self, bucket, name, to_bucket, to_name, query, body):
        self.fake.need(bucket, "storage.objects.get")
        content, _ = self.fake.find(bucket, name)
        return {"done": True, "resource": self.fake.put(to_bucket, to_name, content)}

    def move(self, bucket, name, to_name, query, body):
        copied = self.copy(bucket, name, bucket, to_name, query, body)
        self.delete(bucket, name, query, body)
        return copied["resource"]

    def get(self, bucket, name, query, body):
        self.fake.need(bucket, "storage.objects.get")
        content, generation = self.fake.find(bucket, name)
        if query.get("ifGenerationNotMatch") == str(generation):
            return 304, {}, b""
        if query.get("alt") != "media":
            return self.fake.metadata(bucket, name)
        headers = {"x-goog-generation": str(generation)}
        if wanted := re.fullmatch(r"bytes=(\d*)-(\d*)", self.headers.get("Range", "")):
            first, last = wanted.groups()
            start = int(first) if first else max(0, len(content) - int(last))
            end = min(int(last) + 1, len(content)) if first and last else len(content)
            headers["Content-Range"] = f"bytes {start}-{end - 1}/{len(content)}"
            return 206, headers, content[start:end]
        return 200, headers, content

    def delete(self, bucket, name, query, body):
        self.fake.need(bucket, "storage.objects.delete")
        self.fake.find(bucket, name)
        with self.fake.lock:
            self.fake.objects.pop((bucket, name), None)
        return 204, {}, b""

    def list(self, bucket, query, body):
        self.fake.need(bucket, "storage.objects.list")
        prefix, items, prefixes = query.get("prefix", ""), [], {}
        for name in self.fake.names(f"gs://{bucket}"):
            before, end = name < query.get("startOffset", ""), query.get("endOffset")
            if not name.startswith(prefix) or before or (end and name >= end):
                continue
            inside, slash, _ = name[len(prefix) :].partition(query.get("delimiter") or "\0")
            if slash:
                prefixes[f"{prefix}{inside}{slash}"] = None
            else:
                items.append(self.fake.metadata(bucket, name))
        return {"kind": "storage#objects", "items": items, "prefixes": list(prefixes)}

    def bucket(self, bucket, query, body):
        self.fake.need(bucket, "storage.buckets.get")
        return {"kind": "storage#bucket", "name": bucket}

    def permissions(self, bucket, query, body):
        asked = [value for name, value in parse_qsl(urlsplit(self.path).query)]
        if bucket not in self.fake.roles:
            raise Refused(404, "The specified bucket does not exist.")
        allowed = set().union(*(ROLES[role] for role in self.fake.roles[bucket]))
        return {"permissions": [name for name in asked if name in allowed]}

    def batch(self, query, body):
        """Several deletions in one request."""
        answers = []
        for part in parts_of(self.headers["Content-Type"], body):
            found = re.search(rb"DELETE \S*/storage/v1/b/([^/]+)/o/([^\s?]+)", part)
            try:
                self.delete(*(unquote(text.decode()) for text in found.groups()), query, b"")
                code = 204
            except Refused as refused:
                code = refused.args[0]
            answers.append(
                f"Content-Type: application/http\r\n\r\n"
                f"HTTP/1.1 {code} X\r\nContent-Length: 0\r\n\r\n\r\n"
            )
        text = "".join(f"--batch\r\n{answer}" for answer in answers) + "--batch--"
        return 200, {"Content-Type": "multipart/mixed; boundary=batch"}, text.encode()


@functools.cache  # tensorstore reads the address once
def of_this_process():
    """The stand-in of this process."""
    return FakeBucket()


def parts_of(content_type, body):
    """The contents of a multipart body's parts."""
    message = email.message_from_bytes(f"Content-Type: {content_type}\r\n\r\n".encode() + body)
    return [part.get_payload(decode=True) for part in message.get_payload()]


BUCKET = "/storage/v1/b/(?P<bucket>[^/]+)"
OBJECT = f"{BUCKET}/o/(?P<name>[^/]+)"
CALLS = {  # method and path, and who answers
    f"(POST|PUT) (/resumable)?/upload{BUCKET}/o": Handler.upload,
    f"POST {OBJECT}/rewriteTo/b/(?P<to_bucket>[^/]+)/o/(?P<to_name>[^/]+)": Handler.copy,
    f"POST {OBJECT}/moveTo/o/(?P<to_name>[^/]+)": Handler.move,
    f"GET (/download)?{OBJECT}": Handler.get,
    f"DELETE {OBJECT}": Handler.delete,
    f"GET {BUCKET}/o/?": Handler.list,
    f"GET {BUCKET}/?": Handler.bucket,
    f"GET {BUCKET}/iam/testPermissions": Handler.permissions,
    "POST /batch/storage/v1": Handler.batch,
}

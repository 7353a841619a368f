"""Answers as bytes, from the plain to the wrong."""

from __future__ import annotations

OK = b"HTTP/1.1 200 OK\r\n"
EMPTY = OK + b"Content-Length: 0\r\n\r\n"
CHUNKED = OK + b"Transfer-Encoding: chunked\r\n"


def with_length(length: int | bytes, body: bytes = b"ok", *, line: bytes = OK, more: bytes = b"") -> bytes:
    value = length if isinstance(length, bytes) else b"%d" % length
    return line + more + b"Content-Length: " + value + b"\r\n\r\n" + body


def chunks(*lines: bytes, more: bytes = b"") -> bytes:
    return CHUNKED + more + b"\r\n" + b"".join(line + b"\r\n" for line in lines)


ANSWERS: dict[str, bytes] = {
    # a length
    "length": with_length(2),
    "length 0": EMPTY,
    "length with zeros in front": with_length(b"0002"),
    "length in capitals": OK + b"CONTENT-LENGTH: 2\r\n\r\nok",
    "length with spaces round it": OK + b"Content-Length:  2  \r\n\r\nok",
    "length too long": with_length(3),
    "length too short": with_length(1),
    "length twice, the same": with_length(2, more=b"Content-Length: 2\r\n"),
    "length twice, two": with_length(2, more=b"Content-Length: 3\r\n"),
    "length as a list": with_length(b"2, 2"),
    "length negative": with_length(b"-2"),
    "length with a sign": with_length(b"+2"),
    "length in hex": with_length(b"0x2"),
    "length no number": with_length(b"two"),
    "length empty": with_length(b""),
    "length beyond 64 bits": with_length(2**64 + 2),
    "length beside chunks": chunks(b"2", b"ok", b"0", b"", more=b"Content-Length: 2\r\n"),
    "json": with_length(9, b'{"a":"b"}', more=b"Content-Type: application/json\r\n"),
    # chunks
    "chunks": chunks(b"2", b"ok", b"0", b""),
    "chunks, several": chunks(b"2", b"ok", b"A", b"data: 1\n\n\n", b"0", b""),
    "chunks, none": chunks(b"0", b""),
    "chunks with an extension": chunks(b"2;a=b", b"ok", b"0;last", b""),
    "chunks with a quoted extension": chunks(b'2;a="b;c"', b"ok", b"0", b""),
    "chunks with zeros in front": chunks(b"0002", b"ok", b"000", b""),
    "chunks with a space after the size": chunks(b"2 ", b"ok", b"0", b""),
    "chunks with a space before the size": chunks(b" 2", b"ok", b"0", b""),
    "chunks with trailers": chunks(b"2", b"ok", b"0", b"X-Sum: 1", b"X-End: 2", b""),
    "chunks with a trailer that is a length": chunks(b"2", b"ok", b"0", b"Content-Length: 7", b""),
    "chunks with a bad trailer": chunks(b"2", b"ok", b"0", b"no colon", b""),
    "chunks of no size": chunks(b"", b"ok", b"0", b""),
    "chunks of no number": chunks(b"xy", b"ok", b"0", b""),
    "chunks with 0x": chunks(b"0x2", b"ok", b"0", b""),
    "chunks of a negative size": chunks(b"-2", b"ok", b"0", b""),
    "chunks beyond 64 bits": chunks(b"1" + b"0" * 16, b"ok", b"0", b""),
    "chunks longer than said": chunks(b"2", b"okay", b"0", b""),
    "chunks shorter than said": chunks(b"3", b"ok", b"0", b""),
    "chunks with bare line feeds": CHUNKED + b"\r\n2\nok\n0\n\n",
    "chunks without their last line": chunks(b"2", b"ok", b"0"),
    "chunks, in capitals": OK + b"Transfer-Encoding: CHUNKED\r\n\r\n2\r\nok\r\n0\r\n\r\n",
    "chunks, twice": OK + b"Transfer-Encoding: chunked, chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n",
    "chunks after gzip": OK + b"Transfer-Encoding: gzip, chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n",
    "chunks before gzip": OK + b"Transfer-Encoding: chunked, gzip\r\n\r\nok",
    "chunks in two headers": OK + b"Transfer-Encoding: gzip\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n",
    "chunks, then identity": OK + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n\r\nok",
    "identity, then chunks": OK
    + b"Transfer-Encoding: identity\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n",
    "a length beside identity": with_length(2, more=b"Transfer-Encoding: identity\r\n"),
    "an empty coding": OK + b"Transfer-Encoding:\r\n\r\nok",
    "gzip": OK + b"Transfer-Encoding: gzip\r\n\r\nok",
    "no chunks, but a word like it": OK + b"Transfer-Encoding: xchunked\r\n\r\nok",
    # the connection's end
    "until the end": OK + b"\r\nok",
    "until the end, told so": OK + b"Connection: close\r\n\r\nok",
    "until the end, identity": OK + b"Transfer-Encoding: identity\r\n\r\nok",
    "until the end, HTTP/1.0": b"HTTP/1.0 200 OK\r\n\r\nok",
    "length, HTTP/1.0": with_length(2, line=b"HTTP/1.0 200 OK\r\n"),
    "length, HTTP/1.0, kept": with_length(2, line=b"HTTP/1.0 200 OK\r\n", more=b"Connection: keep-alive\r\n"),
    "chunks, HTTP/1.0": b"HTTP/1.0 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n",
    "length, closed": with_length(2, more=b"Connection: close\r\n"),
    # no body
    "204": b"HTTP/1.1 204 No Content\r\n\r\n",
    "204 with a length": with_length(2, line=b"HTTP/1.1 204 No Content\r\n"),
    "204 with chunks": b"HTTP/1.1 204 No Content\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n",
    "304": b"HTTP/1.1 304 Not Modified\r\nETag: x\r\n\r\n",
    "304 with a length": with_length(2, b"", line=b"HTTP/1.1 304 Not Modified\r\n"),
    "205": b"HTTP/1.1 205 Reset Content\r\nContent-Length: 0\r\n\r\n",
    # an answer to come
    "100": b"HTTP/1.1 100 Continue\r\n\r\n" + with_length(2),
    "100, 102, 103": b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 102 Processing\r\nX: 1\r\n\r\n"
    b"HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n" + chunks(b"2", b"ok", b"0", b""),
    "100 with a length": b"HTTP/1.1 100 Continue\r\nContent-Length: 2\r\n\r\n" + with_length(2),
    "100 and no more": b"HTTP/1.1 100 Continue\r\n\r\n",
    "100 with connection: close": b"HTTP/1.1 100 Continue\r\nConnection: close\r\n\r\n" + with_length(2),
    "101": b"HTTP/1.1 101 Switching Protocols\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\r\n\x81\x00",
    "101 without an upgrade": b"HTTP/1.1 101 Switching Protocols\r\n\r\n" + with_length(2),
    "200 with an upgrade": OK + b"Connection: upgrade\r\nUpgrade: h2c\r\nContent-Length: 2\r\n\r\nok",
    # bytes after the end
    "a second answer": with_length(2) + with_length(2, b"no"),
    "a second answer after chunks": chunks(b"2", b"ok", b"0", b"") + EMPTY,
    "garbage after the end": with_length(2) + b"\x00\x01",
    "line breaks after the end": with_length(2) + b"\r\n\r\n",
    "a second answer after a 204": b"HTTP/1.1 204 No Content\r\n\r\n" + with_length(2),
    "a second answer after the last": with_length(2, more=b"Connection: close\r\n") + EMPTY,
    "garbage after the last": with_length(2, more=b"Connection: close\r\n") + b"\x00\x01",
    "a 100 after the end": with_length(2) + b"HTTP/1.1 100 Continue\r\n\r\n",
    # the first line
    "line breaks in front": b"\r\n\r\n" + with_length(2),
    "no reason": with_length(2, line=b"HTTP/1.1 200\r\n"),
    "an empty reason": with_length(2, line=b"HTTP/1.1 200 \r\n"),
    "a reason beyond ASCII": with_length(2, line=b"HTTP/1.1 200 \xc3\xa9\xff\r\n"),
    "status of two digits": with_length(2, line=b"HTTP/1.1 20 OK\r\n"),
    "status of four digits": with_length(2, line=b"HTTP/1.1 2000 OK\r\n"),
    "status 099": with_length(2, line=b"HTTP/1.1 099 OK\r\n"),
    "status 599": with_length(2, line=b"HTTP/1.1 599 Odd\r\n"),
    "status 999": with_length(2, line=b"HTTP/1.1 999 Odd\r\n"),
    "status no number": with_length(2, line=b"HTTP/1.1 abc OK\r\n"),
    "HTTP/2.0": with_length(2, line=b"HTTP/2.0 200 OK\r\n"),
    "HTTP/0.9": with_length(2, line=b"HTTP/0.9 200 OK\r\n"),
    "HTTP/1.2": with_length(2, line=b"HTTP/1.2 200 OK\r\n"),
    "another protocol": with_length(2, line=b"ICY 200 OK\r\n"),
    "small letters": with_length(2, line=b"http/1.1 200 OK\r\n"),
    "a request": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "garbage": b"\x16\x03\x01\x02\x00 what?\r\n\r\n",
    # headers
    "a folded header": with_length(2, more=b"X-A: b\r\n  c\r\n"),
    "a folded length": OK + b"Content-Length:\r\n 2\r\n\r\nok",
    "a header without a value": with_length(2, more=b"X-A:\r\n"),
    "a header without a name": with_length(2, more=b": b\r\n"),
    "a header without a colon": with_length(2, more=b"X-A b\r\n"),
    "a header with a space before the colon": with_length(2, more=b"X-A : b\r\n"),
    "a header with a space in its name": with_length(2, more=b"X A: b\r\n"),
    "a header with a null": with_length(2, more=b"X-A: b\x00c\r\n"),
    "a header with a control character": with_length(2, more=b"X-A: b\x01c\r\n"),
    "a header with a bare carriage return": with_length(2, more=b"X-A: b\rc\r\n"),
    "a header that ends with a line feed": with_length(2, more=b"X-A: b\n"),
    "a header twice": with_length(2, more=b"X-A: b\r\nX-A: c\r\n"),
    "a header beyond ASCII": with_length(2, more=b"X-A: \xc3\xa9\xff\r\n"),
    "a header with tabs": with_length(2, more=b"X-A:\tb\tc\t\r\n"),
    "a head with bare line feeds": b"HTTP/1.1 200 OK\nContent-Length: 2\n\nok",
    "a compressed body": with_length(2, more=b"Content-Encoding: gzip\r\n"),
}

# What is too large to be cut at every byte.
HUGE: dict[str, bytes] = {
    "a header of 4 KiB": with_length(2, more=b"X-A: " + b"y" * 4096 + b"\r\n"),
    "a hundred headers": with_length(2, more=b"".join(b"X-%d: y\r\n" % index for index in range(100))),
    "a header of 40 KiB": with_length(2, more=b"X-A: " + b"y" * 40 * 2**10 + b"\r\n"),
    "a header of 200 KiB": with_length(2, more=b"X-A: " + b"y" * 200 * 2**10 + b"\r\n"),
    "a thousand headers": with_length(2, more=b"X-A: y\r\n" * 1000),
    "a hundred thousand headers": with_length(2, more=b"X-A: y\r\n" * 100_000),
    "a reason of 200 KiB": with_length(2, line=b"HTTP/1.1 200 " + b"y" * 200 * 2**10 + b"\r\n"),
    "a chunk extension of 200 KiB": chunks(b"2;" + b"y" * 200 * 2**10, b"ok", b"0", b""),
    "ten thousand chunks": chunks(*[b"2", b"ok"] * 10_000, b"0", b""),
    "trailers of 200 KiB": chunks(b"2", b"ok", b"0", *[b"X-A: " + b"y" * 1000] * 200, b""),
    "ten thousand 100s": b"HTTP/1.1 100 Continue\r\n\r\n" * 10_000 + with_length(2),
    "a body of 1 MiB": with_length(2**20, b"y" * 2**20),
    "a chunk of 1 MiB": chunks(b"100000", b"y" * 2**20, b"0", b""),
}

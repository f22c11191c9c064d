"""The connection of a store to Redis, standalone or cluster: few commands, all of 6.2, and one kind of error.

Every multi-key command is given keys of one slot. No text that leaves this module holds the password.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import redis
from redis.asyncio import Redis
from redis.asyncio.cluster import RedisCluster
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.maint_notifications import MaintNotificationsConfig

from kvtransfer.blocks.keys import KEY_BYTES
from kvtransfer.errors import StoreError

NUM_CONNECTIONS = 16
_CONNECT_S = 2.0
# Scripts in one round trip: packing and reading more of them holds up the loop for milliseconds.
_PIPELINE = 16
_FAILURES = (redis.RedisError, redis.exceptions.RedisClusterException, OSError, EOFError)


class IndexAwayError(StoreError):
    """Redis did not execute a command; the text says why, and what to do where that is known. `is_late`: it
    may be there, but did not answer; `is_refusal`: it answered, and is there."""

    def __init__(self, note: str, is_late: bool = False, is_refusal: bool = False) -> None:
        super().__init__(note)
        self.is_late = is_late
        self.is_refusal = is_refusal


class Script:
    """A Lua script and its digest."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.digest = hashlib.sha1(text.encode()).hexdigest()


class RedisLink:
    """Pooled connections to one server or cluster. A question is not tried again here."""

    def __init__(self, url: str, timeout_s: float, ca_file: str = "") -> None:
        """`timeout_s`: after it a silent connection is given up; far longer than anybody waits. `ca_file`:
        who signed the certificate of a rediss:// server ("": somebody whom the system knows)."""
        self._url = url
        has_ca = ca_file and url.startswith("rediss://")
        self._tls: dict[str, Any] = {"ssl_ca_certs": ca_file} if has_ca else {}
        self._timeout_s = timeout_s
        self._client: Redis | RedisCluster | None = None
        self.is_cluster = False

    @property
    def is_connected(self) -> bool:
        """`connect` went through; it says nothing of now."""
        return self._client is not None

    async def connect(self) -> None:
        """Connect to the server and learn its kind. `IndexAwayError`."""
        await self.close()
        client: Redis | RedisCluster | None = None
        try:
            client = server = self._open(Redis)
            if await _is_cluster(server):
                await server.aclose()
                client = cluster = self._open(RedisCluster)
                await cluster.initialize()
        except (*_FAILURES, ValueError, TypeError) as error:  # the last two: a URL that cannot be used
            if client is not None:
                await _leave(client)
            raise IndexAwayError(str(self._away(error))) from None
        self._client = client
        self.is_cluster = isinstance(client, RedisCluster)

    async def close(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            await _leave(client)

    async def mget(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """Return the values of keys of one slot. `IndexAwayError`."""
        client = self._ready()
        try:
            return await client.execute_command("MGET", *keys, **_target(client, keys[0]))  # type: ignore[no-any-return]
        except _FAILURES as error:
            raise self._away(error) from None

    async def mget_blocks(self, prefix: bytes, keys: Sequence[bytes]) -> list[bytes | None]:
        """Return the values of `prefix` + key, for block keys, and a prefix that determines the slot.
        `IndexAwayError`."""
        client = self._ready()
        if isinstance(client, RedisCluster) or set(map(len, keys)) != {KEY_BYTES}:
            return await self.mget([prefix + key for key in keys])
        pool: Any = client.connection_pool
        try:
            connection = await pool.get_connection()
            try:
                await connection.send_packed_command(_pack_mget(prefix, keys))
                return await connection.read_response()  # type: ignore[no-any-return]
            finally:
                await pool.release(connection)
        except _FAILURES as error:
            raise self._away(error) from None

    async def set(self, key: bytes, value: bytes, expiry_s: float) -> None:
        """Set the value of a key, which is dropped after `expiry_s`. `IndexAwayError`."""
        client = self._ready()
        try:
            await client.execute_command(
                "SET", key, value, "PX", round(expiry_s * 1e3), **_target(client, key)
            )
        except _FAILURES as error:
            raise self._away(error) from None

    async def info(self) -> dict[str, Any]:
        """Return the INFO of the server (of a cluster: any of its servers). `IndexAwayError`."""
        return dict(await self._ask("INFO"))

    async def wall_s(self) -> float:
        """Return the server's clock, as Unix time. `IndexAwayError`."""
        seconds, microseconds = await self._ask("TIME")
        return float(seconds) + float(microseconds) * 1e-6

    async def _ask(self, command: str) -> Any:
        client = self._ready()
        target: Any = {}
        if isinstance(client, RedisCluster):
            target = {"target_nodes": client.get_default_node()}
        try:
            return await client.execute_command(command, **target)
        except _FAILURES as error:
            raise self._away(error) from None

    async def run(self, script: Script, keys: Sequence[bytes], args: Sequence[bytes | int]) -> Any:
        """Return the result of the script over keys of one slot. `IndexAwayError`."""
        client = self._ready()
        words = (len(keys), *keys, *args)
        try:
            target = _target(client, keys[0])
            try:
                return await client.execute_command("EVALSHA", script.digest, *words, **target)
            except redis.exceptions.NoScriptError:  # a server that was restarted, or flushed of its scripts
                return await client.execute_command("EVAL", script.text, *words, **target)
        except _FAILURES as error:
            raise self._away(error) from None

    async def run_many(
        self, script: Script, calls: Sequence[tuple[Sequence[bytes], Sequence[bytes | int]]]
    ) -> list[IndexAwayError | None]:
        """Run the script for each (keys of one slot, arguments), in few round trips where the server is no
        cluster; return the result of each."""
        client = self._client
        if client is None or isinstance(client, RedisCluster):
            return [await self._try(script, keys, args) for keys, args in calls]
        outcomes: list[IndexAwayError | None] = []
        for first in range(0, len(calls), _PIPELINE):
            some = calls[first : first + _PIPELINE]
            pipeline = client.pipeline(transaction=False)
            for keys, args in some:
                pipeline.execute_command("EVALSHA", script.digest, len(keys), *keys, *args)
            try:
                results = await pipeline.execute(raise_on_error=False)
            except _FAILURES as error:
                return outcomes + [self._away(error)] * (len(calls) - first)
            for (keys, args), result in zip(some, results, strict=True):
                if isinstance(result, redis.exceptions.NoScriptError):
                    outcomes.append(await self._try(script, keys, args))
                else:
                    outcomes.append(self._away(result) if isinstance(result, Exception) else None)
        return outcomes

    async def _try(
        self, script: Script, keys: Sequence[bytes], args: Sequence[bytes | int]
    ) -> IndexAwayError | None:
        try:
            await self.run(script, keys, args)
        except IndexAwayError as error:
            return error
        return None

    def _open(self, kind: type[Redis] | type[RedisCluster]) -> Any:
        return kind.from_url(
            self._url,
            protocol=2,
            decode_responses=False,
            socket_timeout=self._timeout_s,
            socket_connect_timeout=min(_CONNECT_S, self._timeout_s),
            retry=Retry(NoBackoff(), 0),
            max_connections=NUM_CONNECTIONS,
            # Both would send commands that are not in 6.2.
            driver_info=None,
            maint_notifications_config=MaintNotificationsConfig(enabled=False),
            **self._tls,
        )

    def _ready(self) -> Redis | RedisCluster:
        if self._client is None:
            raise IndexAwayError(f"{redacted(self._url)} was not reached")
        return self._client

    def _away(self, error: Exception) -> IndexAwayError:
        reason = " ".join(str(error).split()) or type(error).__name__
        for hidden in _passwords(self._url):
            reason = reason.replace(hidden, "***")
        remedy = _remedy(error, reason)
        note = f"{redacted(self._url)}: {reason}" + (f"; {remedy}" if remedy else "")
        is_late = isinstance(error, redis.TimeoutError | TimeoutError)
        is_refusal = isinstance(error, redis.ResponseError) and not isinstance(
            error, redis.AuthenticationError
        )
        return IndexAwayError(note, is_late, is_refusal)


async def _leave(client: Redis | RedisCluster) -> None:
    """Close every connection: a cluster's client that has met an error counts itself as new."""
    await client.aclose()
    if isinstance(client, RedisCluster):
        await client.nodes_manager.aclose()
        await client.nodes_manager.aclose("startup_nodes")


def redacted(url: str) -> str:
    """Return the URL without user, password and options, for logs."""
    try:
        parts = urlsplit(url)
        host = parts.hostname or ""
        host = f"[{host}]" if ":" in host else host
        port = f":{parts.port}" if parts.port else ""
    except ValueError:
        return "store.redis_url"
    return f"{parts.scheme}://{host}{port}{parts.path}"


def _passwords(url: str) -> set[str]:
    """Return the strings that must appear in no text."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return {url}
    options = parse_qs(parts.query)
    given = [parts.password or "", *options.get("password", ()), *options.get("ssl_password", ())]
    return {word for password in given for word in (password, unquote(password)) if word}


async def _is_cluster(client: Redis) -> bool:
    try:
        info = await client.info("cluster")
    except redis.exceptions.NoPermissionError:
        return False  # such a user is given a server, not a cluster, or a URL to learn it from
    return bool(info.get("cluster_enabled"))


def _pack_mget(prefix: bytes, keys: Sequence[bytes]) -> bytes:
    """Return the command as bytes for the wire. All keys are equally long and begin alike, so one join packs
    them; the client would take longer for that than Redis for the answer."""
    before = b"\r\n$%d\r\n%s" % (len(prefix) + KEY_BYTES, prefix)
    return b"*%d\r\n$4\r\nMGET%s%s\r\n" % (len(keys) + 1, before, before.join(keys))


def _target(client: Redis | RedisCluster, key: bytes) -> dict[str, Any]:
    """Return which server has the key: the client would compute the slot of every key, which takes far longer
    than the answer. A server that no longer has the key redirects the client."""
    return {"target_nodes": client.get_node_from_key(key)} if isinstance(client, RedisCluster) else {}  # type: ignore[arg-type]


def _remedy(error: Exception, reason: str) -> str:
    text = reason.lower()
    if isinstance(error, redis.AuthenticationError) or any(
        word in text for word in ("wrongpass", "noauth", "invalid password", "authentication required")
    ):
        return "give the right user and password in store.redis_url"
    if isinstance(error, redis.exceptions.NoPermissionError):
        return "let this user run INFO, GET, SET, DEL, MGET, EVAL and EVALSHA on the keys of its namespace"
    if isinstance(error, redis.exceptions.OutOfMemoryError):
        # This server gets no advice on an eviction policy: Ray's control state may be on it.
        return "raise its maxmemory, or give the index a server of its own, with maxmemory-policy allkeys-lru"
    if isinstance(error, redis.exceptions.ReadOnlyError):
        return "it is a replica: store.redis_url must be the primary's"
    if "certificate verify failed" in text:
        return "name the authority that signed its certificate in store.redis_ca_file"
    if "[ssl" in text:
        return (
            "store.redis_url says TLS (rediss://): does that port speak it, and want a certificate of ours?"
        )
    if "timeout" in text and "connecting" in text:
        return "is it there? If store.redis_url begins with rediss://, does that port speak TLS?"
    if "closed by server" in text or "reset by peer" in text:
        return "if that port speaks TLS, store.redis_url must begin with rediss://"
    if isinstance(error, redis.ConnectionError):
        return "start it, or correct store.redis_url"
    return ""

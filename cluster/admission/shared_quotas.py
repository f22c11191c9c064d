"""How the gateways share the tenants' quotas: by records in Redis, for which no request ever waits.

    Quotas --record--> SharedQuotas --SET, with an expiry--> Redis <-- the other gateways
           <--merge--               <--MGET of the others---

Each gateway has one key, `<namespace>:{quotas}:<gateway id>`, written every `PERIOD_S` with all that it has
counted: a record that is written twice or lost changes nothing, and that of a gateway that died expires with
the tokens that it held. While Redis is away, or none is configured, each gateway has its part of the limits.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from cluster.admission.quotas import QuotaRecord, Quotas, QuotaUse
from cluster.metrics.gateway_counters import GatewayCounters
from kvtransfer.codec import Codec
from kvtransfer.common.clock import Clock
from kvtransfer.common.health import Backoff
from kvtransfer.common.tasks import SupervisedTasks
from kvtransfer.errors import WireError
from kvtransfer.store.index.redis_client import IndexAwayError, RedisLink

PERIOD_S = 0.2
# The record of a gateway that no longer writes it.
EXPIRY_S = 2.0
# Redis counts as away after this time without an answer.
_ANSWER_S = 0.5
_LONGEST_PAUSE_S = 5.0
_CANCEL_AGAIN_S = 0.1
# The size of one record; a tenant takes some 100 bytes.
MAX_RECORD_BYTES = 1 << 20
# Other gateways whose records are read.
_MAX_GATEWAYS = 1024

RECORD_CODEC: Codec[QuotaRecord] = Codec(QuotaRecord)

_log = logging.getLogger(__name__)


def quota_key(namespace: str, gateway_id: str) -> bytes:
    """Return the key of a gateway's record; those of all gateways are in one slot of a cluster."""
    return f"{namespace}:{{quotas}}:{gateway_id}".encode()


class SharedQuotas:
    """Exchanges the records of one gateway's `Quotas`, from `start` to `stop`."""

    def __init__(
        self,
        quotas: Quotas,
        gateway_id: str,
        gateways: Callable[[], Iterable[str]],
        counters: GatewayCounters,
        clock: Clock,
        *,
        url: str,
        ca_file: str = "",
        namespace: str = "tandem",
    ) -> None:
        """`gateways` returns the ids of all known gateways, with or without this one; `url` "": there is no
        Redis."""
        self._quotas = quotas
        self._gateway_id = gateway_id
        self._gateways = gateways
        self._counters = counters
        self._clock = clock
        self._namespace = namespace
        self._url = url
        self._link = RedisLink(url, _ANSWER_S, ca_file)
        self._backoff = Backoff(PERIOD_S, _LONGEST_PAUSE_S)
        self._next_try_at = 0.0
        # Why Redis is not used; "" while it is.
        self._away = "no store.redis_url is set" if not url else "Redis was not reached yet"
        # Gateways whose record was not understood, and why.
        self._unread: dict[str, str] = {}
        self._logged = ""
        self._tasks = SupervisedTasks()

    def start(self) -> None:
        """Begin to exchange records, in the background, if any tenant has limits."""
        if self._quotas.is_limited:
            self._tasks.spawn(self._run(), "quotas")

    async def stop(self) -> None:
        """End the exchange: this gateway's record expires."""
        # Until 3.12 a wait with a time limit, as the client does, can swallow a cancellation.
        await self._tasks.close(again_s=_CANCEL_AGAIN_S)
        await self._link.close()

    @property
    def note(self) -> str:
        """The reason why limits are divided among gateways instead of shared; "" where they are shared."""
        share = self._quotas.share
        if share == 1:
            return ""
        because = self._away
        if not because:
            names = (f"{name} ({self._unread.get(name, 'no record')})" for name in self._quotas.missing[:8])
            because = f"what these gateways use is not known: {', '.join(names)}"
        return f"tenants' limits are divided among the gateways, {share:.0%} of each applies here: {because}"

    def uses(self, now: float) -> tuple[QuotaUse, ...]:
        """Return the tenants' use now, of all gateways as far as it is known here."""
        return self._quotas.uses(now)

    async def _run(self) -> None:
        while True:
            await self._exchange()
            self._counters.quota_share = self._quotas.share
            self._log_change()
            await self._clock.sleep(PERIOD_S)

    async def _exchange(self) -> None:
        others = sorted({*self._gateways()} - {self._gateway_id})[:_MAX_GATEWAYS]
        if self._url and self._clock.now() >= self._next_try_at:
            try:
                records = await self._read_others(others)
            except IndexAwayError as error:
                self._away = str(error)
                self._next_try_at = self._clock.now() + self._backoff.failed()
                await self._link.close()
            else:
                self._away = ""
                self._backoff.reset()
                self._quotas.merge(records, self._clock.now())
                return
        self._quotas.divide(len(others), self._clock.now())

    async def _read_others(self, others: list[str]) -> dict[str, QuotaRecord | None]:
        """Write this gateway's record and read the others'. `IndexAwayError`."""
        if not self._link.is_connected:
            await self._link.connect()
        record = RECORD_CODEC.encode(self._quotas.record(self._clock.now()))
        await self._link.set(quota_key(self._namespace, self._gateway_id), record, EXPIRY_S)
        if not others:
            return {}
        values = await self._link.mget([quota_key(self._namespace, name) for name in others])
        self._unread = {}
        return {name: self._decoded(name, value) for name, value in zip(others, values, strict=True)}

    def _decoded(self, name: str, value: bytes | None) -> QuotaRecord | None:
        if value is None:
            return None
        try:
            if len(value) > MAX_RECORD_BYTES:
                raise WireError(f"a record of {len(value)} bytes, at most {MAX_RECORD_BYTES} are read")
            return RECORD_CODEC.decode(value)
        except WireError as error:
            self._unread[name] = str(error)
            return None

    def _log_change(self) -> None:
        """Log that limits are divided, once for each cause, and that they are shared again."""
        note = self.note
        # Redis words one outage differently from try to try.
        state = f"{self._quotas.share} {'away' if self._away else self._quotas.missing}" if note else ""
        if state == self._logged:
            return
        self._logged = state
        if note:
            _log.warning("%s", note)
        else:
            _log.info("all gateways share the tenants' limits again")

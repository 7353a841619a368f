"""Which targets a request is to keep: what its headers say; else what its priority's class has, then what all have."""

from __future__ import annotations

from collections.abc import Mapping

from common.config.proxy import ProxyConfig
from common.wire.fields import seconds_of_header
from common.wire.headers import ITL_TARGET_HEADER, TTFT_TARGET_HEADER
from proxy.placement.estimate import NO_TARGETS, Targets


class TargetRules:
    """``usual``: of requests that name none and whose priority has none."""

    def __init__(self, usual: Targets = NO_TARGETS, by_priority: Mapping[int, Targets] | None = None) -> None:
        self.usual = usual
        self._by_priority = by_priority or {}

    @classmethod
    def of(cls, config: ProxyConfig) -> TargetRules:
        usual = Targets(_seconds(config.ttft_target_ms), _seconds(config.itl_target_ms))
        return cls(
            usual,
            {
                each.priority: Targets(
                    usual.ttft_s if each.ttft_ms is None else _seconds(each.ttft_ms),
                    usual.itl_s if each.itl_ms is None else _seconds(each.itl_ms),
                )
                for each in config.priority_targets
            },
        )

    def targets(self, headers: Mapping[str, str], priority: int) -> Targets:
        """Raises InvalidRequestError naming the header."""
        rule = self._by_priority.get(priority, self.usual)
        ttft_s = seconds_of_header(headers, TTFT_TARGET_HEADER)
        itl_s = seconds_of_header(headers, ITL_TARGET_HEADER)
        return Targets(rule.ttft_s if ttft_s is None else ttft_s, rule.itl_s if itl_s is None else itl_s)


def _seconds(milliseconds: int | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1000

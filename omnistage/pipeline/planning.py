"""What a request will run: its stages, their parameters, and whether each of them can."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from omnistage.core.errors import ConfigError, InvalidRequestError, OmniError
from omnistage.core.failures import internal_error
from omnistage.core.family import Bridge
from omnistage.core.graph import PipelineGraph
from omnistage.core.params import DiffusionParams, StageParams, answers
from omnistage.core.stage import Stage
from omnistage.core.types import StageInput
from omnistage.pipeline.request import OmniRequest, RequestPlan, Route, spread


class RequestPlanner:
    """Plans requests over a graph. Thread-safe. `stages` may change: a stage that failed is replaced there."""

    def __init__(self, graph: PipelineGraph, stages: Mapping[str, Stage], defaults: Mapping[str, StageParams]) -> None:
        self._graph = graph
        self._stages = stages
        self._route = functools.cache(functools.partial(Route.over, graph))
        self._types = {name: stages[name].params_type for name in graph.order}
        self._shares_params = any(kind.shared for kind in self._types.values())
        params = {name: defaults.get(name) or kind() for name, kind in self._types.items()}
        self.defaults = spread(params, self._types)
        """What stages use where a request says nothing."""

    def plan(self, request: OmniRequest) -> RequestPlan:
        """Which stages a request runs, and with which parameters. Raises what is wrong with it."""
        route = self._route(request.info.modalities)
        params = self._merged(request.params)
        count = answers(params[route.lead])
        if count > 1 and not route.ends_with_lead:
            raise InvalidRequestError("n > 1 is supported for text only; set modalities=['text']", param="n")
        for name in route.stages:
            if name != route.lead and answers(params[name]) > 1:
                raise InvalidRequestError(f"stage {name!r} gives one answer; leave n out for it", param=f"{name}.n")
        pictures = [each.n for name in route.stages if isinstance(each := params[name], DiffusionParams)]
        return RequestPlan(request, route, params, count, max(count, *pictures) if pictures else count)

    def check(self, plan: RequestPlan) -> None:
        """Ask the stages. Raises what they say; what else one raises is its defect."""
        route, params, request = plan.route, plan.params, plan.request
        entry, emits_hidden = route.entry, route.entry in route.emits_hidden
        with _checking():
            for name in route.stages:
                self._stages[name].check_params(params[name])
            stage_input = StageInput(request.info, params[entry], request.payload, emit_hidden=emits_hidden)
            self._stages[entry].check(stage_input)

    def check_params(self, overrides: Mapping[str, StageParams]) -> None:
        """Ask the stages about the parameters alone that a request gives them. Raises as `check` does."""
        params = self._merged(overrides)
        with _checking():
            for name in overrides:
                self._stages[name].check_params(params[name])

    def _merged(self, overrides: Mapping[str, StageParams]) -> dict[str, StageParams]:
        if unknown := sorted(overrides.keys() - self.defaults.keys()):
            raise InvalidRequestError(
                f"no stage is called {', '.join(unknown)}; stages: {', '.join(self._graph.order)}",
                param="sampling_params",
            )
        for name, override in overrides.items():
            expected = self._types[name]
            if not isinstance(override, expected):
                raise InvalidRequestError(
                    f"stage {name!r} takes {expected.__name__}, got {type(override).__name__}", param="sampling_params"
                )
        params = spread(overrides, self._types) if self._shares_params else overrides
        return {name: default.merged(params.get(name)) for name, default in self.defaults.items()}


@contextmanager
def _checking() -> Iterator[None]:
    try:
        yield
    except OmniError:
        raise
    except BaseException as error:  # the boundary to a stage's code
        raise internal_error("checking the request", error) from error


def check_parts(graph: PipelineGraph, stages: Mapping[str, Stage], bridges: Mapping[str, Bridge]) -> None:
    """Raise `ConfigError` unless every stage of the graph is there, and a bridge for each that has sources."""
    for name in graph.order:
        if name not in stages:
            raise ConfigError(f"the pipeline has a stage {name!r}, but none was built", param=f"stages.{name}")
        if graph.sources(name) and name not in bridges:
            raise ConfigError(f"stage {name!r} has sources, but no bridge", param=f"stages.{name}")

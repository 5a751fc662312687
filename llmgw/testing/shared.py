"""What the contracts of every kind have in common."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from twisted.internet.task import Clock
from zope.interface.verify import verifyObject

from llmgw.dropins import NAME
from llmgw.errors import ConfigError
from llmgw.interfaces import CONTRACT, IFactory


class FactoryContract:
    """Tests of the factory itself.

    Set by the ``…_contract`` function, and free to be overridden:

    :cvar factory: the plugin.
    :cvar options: its table of the config, without ``plugin``.
    """

    factory: Any
    options: Mapping[str, Any] = {}
    interface: Any
    product: Any

    def build(self, options: Mapping[str, Any], clock: Clock) -> Any:
        """Call the factory as the gateway does."""
        return self.factory.build(options, clock)

    def test_the_factory_keeps_its_interface(self) -> None:
        """Name, description, contract number, and the signature of ``build``."""
        verifyObject(self.interface, self.factory)
        if not self.interface.isOrExtends(IFactory):
            return
        name = self.factory.name
        assert NAME.match(name), f"{name!r} is not lower case with hyphens"
        assert self.factory.description, "no description"
        assert "\n" not in self.factory.description, "the description is more than one line"
        assert self.factory.contract == CONTRACT, f"written for contract {self.factory.contract}"

    def test_what_it_builds_keeps_its_interface(self) -> None:
        """The product has every method, with a signature that fits."""
        verifyObject(self.product, self.build(self.options, Clock()))

    def test_building_starts_nothing(self) -> None:
        """Config is built at ``--check`` too, when no reactor will ever run."""
        clock = Clock()
        self.build(self.options, clock)
        calls = clock.getDelayedCalls()
        assert not calls, f"build left calls behind: {calls}"

    def test_building_twice_gives_two(self) -> None:
        """A factory holds no live state, so nothing is shared but itself."""
        first, second = (self.build(self.options, Clock()) for _ in range(2))
        assert first is not second, "build returned the same object twice"

    def test_an_unknown_option_is_refused_by_name(self) -> None:
        """A typing error in the config must never pass in silence."""
        try:
            self.build({**self.options, "no_such_option": 1}, Clock())
        except ConfigError as error:
            places = [fault.where for fault in error.faults]
            assert "no_such_option" in places, f"the faults name {places}, not no_such_option"
        else:
            raise AssertionError("an unknown option was accepted")

    def test_options_are_left_alone(self) -> None:
        """They belong to the config, which is compared at the next reload."""
        options = dict(self.options)
        self.build(options, Clock())
        assert options == dict(self.options), f"options became {options}"


def contract(base: type[Any], name: str, **attributes: Any) -> type[Any]:
    """A subclass of ``base``; ``staticmethod`` is not needed since factories are objects."""
    return type(name, (base,), {"__doc__": base.__doc__, **attributes})


def class_name(factory: Any, base: type[Any]) -> str:
    """``TestMyRouterRouterContract``, for a class that is found by pytest when assigned to its name."""
    words = str(getattr(factory, "name", "")).replace("-", " ").title().replace(" ", "")
    return f"Test{words}{base.__name__}"

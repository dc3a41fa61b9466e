"""The modules of the page: what each may import, and how they are joined for a page in one file."""

from __future__ import annotations

import json
import re
from importlib.resources import files

import pytest

from batchkit.commands.view.page import ASSETS, MODULES, read, script
from tests.support.paths import ROOT

NPM = "https://registry.npmjs.org/"
NO_CODE = "types.js"  # only descriptions of types


def test_every_module_is_served_and_joined() -> None:
    names = {
        entry.name
        for entry in files("batchkit.commands.view").iterdir()
        if entry.name.endswith(".js")
    }
    assert {*MODULES} == names - {NO_CODE}
    assert {*ASSETS} == {*MODULES, "page.css"}


@pytest.mark.parametrize("name", MODULES)
def test_a_module_imports_names_of_modules_before_it(name: str) -> None:
    """Other forms (``as``, ``*``, ``default``) would leave a name undefined in the joined script."""
    imports = re.findall(r"^import .*", read(name), re.MULTILINE)
    found = re.findall(r'^import \{([\w,\s]+)\} from "\./(\w+\.js)";$', read(name), re.MULTILINE)
    assert len(found) == len(imports)
    assert {module for _, module in found} <= {*MODULES[: MODULES.index(name)]}
    assert not [names for names, _ in found if re.search(r"\bas\b", names)]
    exports = re.findall(r"^export .*", read(name), re.MULTILINE)
    assert all(re.match(r"export (async function|function|const|let) \w+", one) for one in exports)


def test_no_two_modules_define_the_same_name() -> None:
    names = re.findall(r"^(?:async )?(?:function|const|let) (\w+)", script(), re.MULTILINE)
    assert len(names) > 100
    assert [name for name in {*names} if names.count(name) > 1] == []


def test_the_packages_that_check_the_page_are_pinned_and_name_only_the_public_registry() -> None:
    wanted = json.loads((ROOT / "package.json").read_text(encoding="utf-8"))
    locked = json.loads((ROOT / "package-lock.json").read_text(encoding="utf-8"))["packages"]
    assert "dependencies" not in wanted
    for name, version in wanted["devDependencies"].items():
        assert locked[f"node_modules/{name}"]["version"] == version
    for name, package in locked.items():
        assert not name or package["integrity"].startswith("sha512-")
        assert package.get("resolved", NPM).startswith(NPM)


def test_the_joined_script_imports_and_exports_nothing_and_can_be_inside_an_element() -> None:
    assert not re.search(r"^(import|export)\b", script(), re.MULTILINE)
    assert not re.search(r"</script|<!--", script())

"""What the wheel stands on, as it is installed here: pins for an audit, licences, and a judge of what an audit found.

python .ci/supply.py pins wheel|environment      name==version, a line each
python .ci/supply.py licences                    of what the wheel needs; fails where one tells none
python .ci/supply.py judge AUDIT.json            fails for what is broken, and for what was not looked at
"""

import json
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import Distribution, PackageNotFoundError, distribution, distributions
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

PROJECT = Path(__file__).resolve().parents[1] / "pyproject.toml"
FOR_USERS = (
    "fast",
    "gguf",
    "grammar",
    "serve",
)  # extras that bring libraries of their own, and run without a GPU


def wheel_needs() -> dict[str, Distribution]:
    """All that pyproject's dependencies and extras for users bring along here, by name."""
    project = tomllib.loads(PROJECT.read_text())["project"]
    asked = [
        *project["dependencies"],
        *(one for extra in FOR_USERS for one in project["optional-dependencies"][extra]),
    ]
    left, found = [Requirement(one) for one in asked], dict[str, Distribution]()
    seen = set[str]()
    while left:
        wanted = left.pop()
        if str(wanted) in seen:
            continue
        seen.add(str(wanted))
        try:
            own = distribution(wanted.name)
        except PackageNotFoundError:
            raise SystemExit(
                f"{wanted.name} is needed and not installed: make .venv/.installed-dev"
            ) from None
        found[canonicalize_name(wanted.name)] = own
        left += [
            one
            for one in map(Requirement, own.requires or ())
            if is_meant(one, wanted.extras or {""})
        ]
    return found


def is_meant(requirement: Requirement, extras: set[str]) -> bool:
    """Whether it holds on this machine, for one of these extras."""
    return requirement.marker is None or any(
        requirement.marker.evaluate({"extra": extra}) for extra in extras | {""}
    )


def environment() -> dict[str, Distribution]:
    """All that is installed, but for the project itself."""
    found = {canonicalize_name(one.metadata["Name"]): one for one in distributions()}
    return {name: one for name, one in found.items() if name != "offload"}


def pins(found: dict[str, Distribution]) -> Iterator[str]:
    """Versions as an index knows them: a build such as +cpu is none of its own."""
    return (f"{name}=={Version(one.version).public}" for name, one in sorted(found.items()))


def licence(one: Distribution) -> str:
    """What a package says of itself, in the newest words that it has; empty where it says nothing."""
    told = one.metadata
    classified = [
        line.rpartition(" :: ")[2]
        for line in told.get_all("Classifier") or ()
        if line.startswith("License")
    ]
    return next(
        iter([*filter(None, [told["License-Expression"], ", ".join(classified), told["License"]])]),
        "",
    )[:60]


def holds_nothing(one: Distribution) -> bool:
    """Whether it only asks for other packages, as `cuda-toolkit` does: there is no file that a licence could be of."""
    return one.files is not None and all(file.parts[0].endswith(".dist-info") for file in one.files)


def show_licences() -> int:
    """A line for each package."""
    needed = sorted(wheel_needs().items())
    told = {
        name: (one.version, licence(one).split("\n")[0] or "nothing is in it" * holds_nothing(one))
        for name, one in needed
    }
    for name, (version, kind) in told.items():
        print(f"{name:28} {version:16} {kind or 'UNKNOWN'}")
    unknown = [name for name, (_, kind) in told.items() if not kind or kind == "UNKNOWN"]
    print(
        f"{len(told)} packages"
        + (f"; no licence is told by {', '.join(unknown)}" if unknown else "")
    )
    return bool(unknown)


def judge(path: Path) -> int:
    """pip-audit ends well, and says that nothing is known, of packages that it could not ask for."""
    try:
        found = json.loads(path.read_text())["dependencies"]
    except (OSError, ValueError, KeyError):
        print("NOT audited: the advisory database cannot be reached, see above", file=sys.stderr)
        return 1
    skipped = [f"{one['name']} ({one['skip_reason']})" for one in found if "skip_reason" in one]
    broken = [(one["name"], one["version"], bug) for one in found for bug in one.get("vulns", ())]
    for name, version, bug in broken:
        print(
            f"{name} {version}: {bug['id']}, mended in {', '.join(bug['fix_versions']) or 'no version'}"
        )
    print(f"{len(found) - len(skipped)} of {len(found)} packages audited, {len(broken)} advisories")
    if skipped or not found:
        print(f"NOT audited: {len(skipped)} packages, such as {skipped[:1]}", file=sys.stderr)
    return bool(skipped or broken or not found)


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["pins", "wheel"]:
            print(*pins(wheel_needs()), sep="\n")
        case ["pins", "environment"]:
            print(*pins(environment()), sep="\n")
        case ["licences"]:
            sys.exit(show_licences())
        case ["judge", path]:
            sys.exit(judge(Path(path)))
        case _:
            sys.exit(__doc__)

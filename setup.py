"""Map the top-level folders into one import package, with no list to edit when a folder is added."""

from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent
PARTS = ("dispatch", "backends", "policies", "capabilities")

package_dir = {"kernelmux": "kernelmux"}
packages = ["kernelmux"]
for part in PARTS:
    for init in sorted((ROOT / part).rglob("__init__.py")):
        folder = init.parent.relative_to(ROOT)
        name = "kernelmux." + ".".join(folder.parts)
        packages.append(name)
        package_dir[name] = folder.as_posix()
for init in sorted((ROOT / "kernelmux").rglob("*/__init__.py")):
    packages.append(".".join(init.parent.relative_to(ROOT).parts))

version = {}
exec((ROOT / "kernelmux" / "version.py").read_text(), version)
setup(version=version["__version__"], packages=packages, package_dir=package_dir)

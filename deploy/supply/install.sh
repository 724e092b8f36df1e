#!/usr/bin/env bash
# Installs kinetod into an environment, for the image and the packages:
#   deploy/supply/install.sh TOOLS_PYTHON ENVIRONMENT EXTRAS SBOM
#
# TOOLS_PYTHON has the venv module with pip. ENVIRONMENT is a virtual environment without pip. SBOM is the CycloneDX file
# that is written. Every file that is fetched, tools included, is one whose SHA-256 is in the locks beside this script, and
# none is built here but kinetod. What the extras need is then chosen among these files, without an index.
set -euo pipefail
umask 022  # whoever builds: everybody reads what is installed, and root alone writes it
tools_python=$1 environment=$2 extras=$3 sbom=$4
cd "$(dirname "$0")/../.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
quiet=(--quiet --disable-pip-version-check)

"$tools_python" -m venv "$work/tools"
"$work/tools/bin/pip" install "${quiet[@]}" --require-hashes --only-binary :all: -r deploy/supply/build.txt
pip=("$work/tools/bin/pip" --python "$environment/bin/python3")
"${pip[@]}" download "${quiet[@]}" --require-hashes --only-binary :all: --no-deps --dest "$work/files" \
    -r deploy/supply/requirements.txt
"$work/tools/bin/pip" wheel "${quiet[@]}" --no-index --no-deps --no-build-isolation --wheel-dir "$work/files" .
version=$(sed -n 's/^__version__ = "\(.*\)"/\1/p' agent/kineto_agent/version.py)
# Isolated: folders that the builder's own configuration names are no sources. The bill of materials looks at the hashes again.
"${pip[@]}" --isolated install "${quiet[@]}" --no-index --find-links "$work/files" --no-compile --no-warn-script-location \
    --report "$work/report.json" "kinetod${extras:+[$extras]}==$version"
PYTHONPATH=deploy/supply "$work/tools/bin/python" -m pinned.sbom "$environment" "$work/report.json" "$sbom"

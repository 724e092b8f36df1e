#!/usr/bin/env bash
# Builds kinetod's Debian and RPM packages:  deploy/packages/build.sh [deb] [rpm]
#
#   PYTHON=/usr/bin/python3   the interpreter of the hosts that the packages are for; its minor version is a dependency
#   OUT=dist/packages         where they go
#   EXTRAS=nvidia             extras of pyproject.toml that are packed as well, separated by commas
#
# What is packed is a virtual environment in /opt/kinetod. A zipapp would have to unpack its compiled libraries (gRPC,
# Arrow, DuckDB) at every start; system packages of these are too old or missing on the distributions that GPU hosts
# run; an interpreter of our own would double the size and miss the distribution's security updates. So nothing is
# fetched on the host, and the only dependencies are Python and systemd. The environment refers to itself by its path.
#
# Needs: the interpreter's venv module, dpkg-deb (dpkg), rpmbuild (rpm). Root is not needed.
set -euo pipefail
umask 022  # whoever builds: everybody reads what is installed, and root alone writes it
cd "$(dirname "$0")/../.."
formats=${*:-deb rpm}
python=${PYTHON:-/usr/bin/python3}
out=$(mkdir -p "${OUT:-dist/packages}" && cd "${OUT:-dist/packages}" && pwd)
extras=${EXTRAS-nvidia}
prefix=/opt/kinetod

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
root=$work/root
version=$(sed -n 's/^__version__ = "\(.*\)"/\1/p' agent/kineto_agent/version.py)
minor=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
[ -n "$version" ] || { echo "agent/kineto_agent/version.py has no version" >&2; exit 1; }

# The environment, made at its place below the root, then told where it will lie.
mkdir -p "$root$prefix"
"$python" -m venv --symlinks --without-pip "$root$prefix"
tools=$python  # Debian's Python has ensurepip in a package of its own
if [ -x .venv/bin/python ]; then tools=.venv/bin/python; fi
deploy/supply/install.sh "$tools" "$root$prefix" "$extras" "$root$prefix/share/sbom/kinetod.cdx.json"
rm -rf "$root$prefix"/bin/{Activate.ps1,activate}*
find "$root$prefix" -name __pycache__ -prune -exec rm -rf {} +
find "$root$prefix" -type d \( -name tests -o -name include \) -path '*/site-packages/*' -prune -exec rm -rf {} +
grep -rlIZ "$root$prefix" "$root$prefix/bin" "$root$prefix/pyvenv.cfg" | xargs -0 -r sed -i "s|$root$prefix|$prefix|g"
# Checked by their contents, not by the times that a package manager gives them.
"$root$prefix/bin/python3" -m compileall -q -j 0 -s "$root" --invalidation-mode unchecked-hash \
    "$root$prefix"/lib/python*/site-packages >/dev/null || true  # templates of other Pythons do not compile

mkdir -p "$root$prefix/share/doc/kinetod" "$root/usr/bin"
cp -r README.md LICENSE SECURITY.md docs/*.md "$root$prefix/share/doc/kinetod/"
install -D -m 0755 -t "$root/usr/share/kinetod/slurm" deploy/slurm/{TaskProlog,Prolog,Epilog}
install -m 0644 -t "$root/usr/share/kinetod/slurm" deploy/slurm/README.md
for program in kinetod kinetoctl; do ln -s "$prefix/bin/$program" "$root/usr/bin/$program"; done
fakeroot=""
[ "$(id -u)" = 0 ] || fakeroot=fakeroot  # the files belong to root
# shellcheck disable=SC2086
$fakeroot "$root$prefix/bin/python3" -I -m kinetoctl host install --for-package files --root "$root" \
    --programs "$prefix/bin" >/dev/null
chmod -R go-w "$root"

for format in $formats; do
    case $format in
        deb)
            architecture=$(dpkg --print-architecture)
            mkdir -p "$root/DEBIAN"
            size=$(du -sk --exclude=DEBIAN "$root" | cut -f1)
            sed -e "s/@VERSION@/$version/; s/@ARCHITECTURE@/$architecture/; s/@SIZE@/$size/; s/@PYTHON@/$minor/g" \
                deploy/packages/control.in > "$root/DEBIAN/control"
            for script in postinst prerm postrm; do install -m 0755 "deploy/packages/$script" "$root/DEBIAN/$script"; done
            dpkg-deb --root-owner-group -Zxz --build "$root" "$out/kinetod_${version}_$architecture.deb" >/dev/null
            rm -rf "$root/DEBIAN"
            echo "$out/kinetod_${version}_$architecture.deb"
            ;;
        rpm)
            sed -e "s/@VERSION@/$version/; s/@PYTHON@/$minor/g; s|@ROOT@|$root|" deploy/packages/kinetod.spec.in > "$work/kinetod.spec"
            rpmbuild -bb --quiet --define "_topdir $work/rpm" --define "_rpmdir $out" --define '_build_id_links none' \
                --define '_rpmfilename %%{name}-%%{version}-%%{release}.%%{arch}.rpm' "$work/kinetod.spec"
            echo "$out"/kinetod-"$version"-1.*.rpm
            ;;
        *)
            echo "deb or rpm, not $format" >&2
            exit 2
            ;;
    esac
done

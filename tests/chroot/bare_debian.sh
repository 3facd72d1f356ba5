#!/usr/bin/env bash
# Proves the two commands of the README on a bare Debian 12: makes one with debootstrap, clones the
# project's last commit into it, and runs launch/quickstart.sh and launch/test.sh inside. Needs
# root, debootstrap and about 6 GB; takes packages from the mirror that this machine uses.
#   tests/chroot/bare_debian.sh DIRECTORY [SCRIPT ...]     default: both scripts
# DIRECTORY must not exist or hold an earlier chroot of this script, which is then used again.
set -euo pipefail

if (($# < 1)) || ((EUID != 0)); then
  echo "[chroot] usage, as root: tests/chroot/bare_debian.sh DIRECTORY [SCRIPT ...]" >&2
  exit 2
fi
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
mkdir -p "$1"
chroot=$(cd "$1" && pwd)
shift
scripts=("$@")
if ((${#scripts[@]} == 0)); then
  scripts=(launch/quickstart.sh launch/test.sh)
fi

# Each run clones anew: a second one in the same directory would pull the first one's from under it.
exec 9>"$chroot.lock"
if ! flock -n 9; then
  echo "[chroot] another run is using $chroot: wait for it, or name another directory" >&2
  exit 1
fi

# The first Debian mirror in apt's lists, which may be in either of its two forms: not all of the
# files exist.
mirror() {
  { cat /etc/apt/sources.list /etc/apt/sources.list.d/*.list /etc/apt/sources.list.d/*.sources \
    2>/dev/null || true; } |
    sed -nE 's/^(URIs:|deb( \[[^]]*\])?) +([^ ]+\/debian)\/?( .*)?$/\3/p' | head -n 1
}

mounted=()
clean_up() {
  for ((i = ${#mounted[@]} - 1; i >= 0; --i)); do
    umount "${mounted[$i]}" || umount -l "${mounted[$i]}" || true
  done
}
trap clean_up EXIT

mount_inside() {
  local target=${*: -1}
  mkdir -p "$target"
  mount "$@"
  mounted+=("$target")
}

if [[ ! -x $chroot/usr/bin/git ]]; then
  uri=$(mirror)
  if [[ -z $uri ]]; then
    echo "[chroot] apt's lists on this machine name no Debian mirror: add one" >&2
    exit 1
  fi
  echo "[chroot] making a bare Debian 12 in $chroot"
  debootstrap --variant=minbase --include=git,ca-certificates bookworm "$chroot" "$uri"
fi
# What this machine needs to reach the network, it needs inside too.
cp /etc/resolv.conf /etc/hosts "$chroot/etc/"
mount_inside -t proc proc "$chroot/proc"
mount_inside -t tmpfs -o size=2g tmpfs "$chroot/dev/shm"
mount_inside -t devpts devpts "$chroot/dev/pts"

echo "[chroot] cloning $(git -C "$root" rev-parse --short HEAD)"
rm -rf "$chroot/root/bifocal"
git clone -q "$root" "$chroot/root/bifocal"

for script in "${scripts[@]}"; do
  begin=$SECONDS
  echo "[chroot] $script"
  env -i HOME=/root PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin LANG=C.UTF-8 \
    ${http_proxy:+http_proxy="$http_proxy"} ${https_proxy:+https_proxy="$https_proxy"} \
    chroot "$chroot" bash -c "cd /root/bifocal && bash $script" </dev/null
  echo "[chroot] $script took $((SECONDS - begin)) s"
done
echo "[chroot] all passed"

# Two hosts on one machine: network namespaces a and b with addresses of their own, joined by a virtual
# cable, each with a host name of its own. Sourced by the scripts beside it.
# shellcheck shell=bash

# Names carry the process number, so that two runs do not meet.
netns_a=bifocal-a-$$ netns_b=bifocal-b-$$
address_a=10.77.0.1 address_b=10.77.0.2

# Exits with 77 where the machine does not let us.
netns_up() {
  local why=""
  if ! command -v ip >/dev/null; then
    why="no program ip (iproute2)"
  elif ! why=$(ip netns add "$netns_a" 2>&1 && ip netns add "$netns_b" 2>&1); then
    why="no network namespaces: $why"
  elif ! why=$(ip link add name veth-a netns "$netns_a" type veth peer name veth-b \
    netns "$netns_b" 2>&1); then
    why="no virtual cables: $why"
  fi
  if [[ -n $why ]]; then
    netns_down
    echo "[netns] skipped: $why; needs root and Linux with namespaces and veth" >&2
    exit 77
  fi
  netns_address "$netns_a" veth-a "$address_a"
  netns_address "$netns_b" veth-b "$address_b"
}

# netns_address NAMESPACE DEVICE ADDRESS
netns_address() {
  ip -n "$1" address add "$3/24" dev "$2"
  ip -n "$1" link set "$2" up
  ip -n "$1" link set lo up
}

netns_down() {
  ip netns del "$netns_a" 2>/dev/null || true
  ip netns del "$netns_b" 2>/dev/null || true
}

# netns_on a|b COMMAND...: on that host.
netns_on() {
  local side=$1 space=$netns_a
  shift
  if [[ $side == b ]]; then
    space=$netns_b
  fi
  # shellcheck disable=SC2016  # the inner shell expands them
  ip netns exec "$space" unshare --uts bash -c 'hostname "$0" && exec "$@"' "host-$side" "$@"
}

#!/bin/sh
# Build the image and train a server and two devices between containers on loopback. Needs buildah, and no daemon:
#   make image-test BASE=localhost/debian IMAGE_ARGS="--build-arg PIP_FIND_LINKS=/wheels --volume ./wheels:/wheels:ro"
# A base without a registry: debootstrap --variant=minbase stable root; rm -f root/var/cache/apt/archives/*.deb;
# tar --create --directory root . | podman import - localhost/debian
set -eu
cd "$(dirname "$0")/.."
image=localhost/semisfl-image-test port=${PORT:-18443}
# shellcheck disable=SC2086  # several arguments in one variable
buildah bud --isolation chroot ${BASE:+--build-arg BASE="$BASE"} ${IMAGE_ARGS:-} --tag "$image" .
size=$(buildah images --json "$image" | tr -d ' \n' | sed 's/.*"size":"\([^"]*\)".*/\1/')
echo "the image has $size"
data=$(mktemp --directory)
server=$(buildah from "$image") one=$(buildah from "$image") two=$(buildah from "$image")
trap 'kill $(jobs -p) 2>/dev/null || true; buildah rm "$server" "$one" "$two" >/dev/null; rm -rf "$data"' EXIT
chown 10001:10001 "$data"
# With a root that cannot be written, as in compose.yaml: a mount namespace, since buildah has no option for it.
# shellcheck disable=SC2016  # the inner shell replaces these variables
in_container() {
    root=$(buildah mount "$1") && shift
    unshare --mount sh -ec '
        root=$1 data=$2 && shift 2
        mount --bind "$root" "$root"
        for place in dev proc sys; do mount --rbind "/$place" "$root/$place"; done
        mount -t tmpfs tmpfs "$root/tmp"
        mount --bind "$data" "$root/data"
        touch "$root/etc/hosts" && mount --bind /etc/hosts "$root/etc/hosts"
        mount -o remount,bind,ro "$root"
        exec timeout 600 chroot --userspec=10001:10001 "$root" env --chdir=/data PATH=/opt/semisfl/bin:/usr/bin:/bin HOME=/data \
            SEMISFL_CACHE=/tmp/semisfl OMP_NUM_THREADS=1 "$@"' - "$root" "$data" "$@"
}
in_container "$server" grep --quiet '^[^ ]* / [^ ]* ro,' /proc/self/mounts
in_container "$server" python3 -c '
import pathlib, numpy, PIL.Image
draw = numpy.random.default_rng(0)
for place, count in {"labeled/train/a": 8, "labeled/train/b": 8, "labeled/test/a": 8, "labeled/test/b": 8, "1": 12, "2": 12}.items():
    folder = pathlib.Path(place); folder.mkdir(parents=True)
    for number in range(count):
        PIL.Image.fromarray(draw.integers(0, 256, (16, 16), dtype="uint8")).save(folder / f"{number}.png")
'
in_container "$server" sh -ec 'semisfl certs init --dir certs; semisfl certs server --dir certs --host localhost
    for number in 1 2; do semisfl certs client --dir certs --name device-$number; done'
settings="rounds=2 clients.total=2 clients.active=2 clients.batch=4 clients.steps=2 server.batch=4 server.steps=2 network.quorum=2"
# shellcheck disable=SC2086
in_container "$server" semisfl serve digits --labeled labeled --certs certs --listen "localhost:$port" --out run --set $settings &
serving=$!
# shellcheck disable=SC2086
digest=$(in_container "$server" semisfl inspect digits --labeled labeled --set $settings | grep -o 'sha256:[0-9a-f]*')
in_container "$one" semisfl join "localhost:$port" --data 1 --certs certs/clients/device-1 --status 1.json --accept "$digest" &
first=$!
in_container "$two" semisfl join "localhost:$port" --data 2 --certs certs/clients/device-2 --status 2.json --accept "$digest" &
second=$!
wait $first && wait $second && wait $serving
grep '"state": "finished", "rounds": 2' "$data/1.json" "$data/2.json"
grep 'finished: 2 rounds done' "$data/run/run.log"

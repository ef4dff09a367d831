# The first process of a host: builds its root and becomes its SSH server. hosts.py runs it in new namespaces.
set -eu

mount -t tmpfs -o mode=755 host-disk "$DISK"
mkdir "$DISK/upper" "$DISK/work" "$DISK/root"
mount -t overlay -o "lowerdir=/,upperdir=$DISK/upper,workdir=$DISK/work" host-root "$DISK/root"
root=$DISK/root

mount --rbind /dev "$root/dev"
mount -t tmpfs -o mode=1777 host-shm "$root/dev/shm"
mount --rbind /sys "$root/sys"
mount -t proc host-proc "$root/proc"
mount -t tmpfs -o mode=1777 host-tmp "$root/tmp"
mount -t tmpfs -o mode=755 host-run "$root/run"
mount -t tmpfs -o mode=755 host-home "$root/home"
mkdir "$root/run/sshd" "$root/run/lock"

show() { # FOLDER: at the same place, for everybody
    mkdir -p "$root$1"
    local parent=$1
    while parent=$(dirname "$parent"); [ "$parent" != / ]; do chmod a+rx "$root$parent"; done
    mount --bind "$1" "$root$1"
}
while read -r folder; do
    show "$folder"
    mount -o remount,bind,ro "$root$folder"
done <<< "$VISIBLE"
show "$SHARED"

# Settings and secrets of this machine's administrator.
rm -rf "$root/root/.ssh" "$root/root/.ray" "$root/root/.bashrc" "$root/root/.aws" "$root/root/.config"
if [ "$HOST_USER" = root ]; then
    sed -i "s|^root:.*|root:x:0:0:root:$HOST_HOME:/bin/bash|" "$root/etc/passwd"
else
    echo "$HOST_USER:x:7001:7001::$HOST_HOME:/bin/bash" >> "$root/etc/passwd"
    echo "$HOST_USER:x:7001:" >> "$root/etc/group"
    # Not `!`, which stands for an account that is locked: the server would refuse it keys too.
    echo "$HOST_USER:*:19000:0:99999:7:::" >> "$root/etc/shadow"
fi
mkdir -p "$root$HOST_HOME"
cp -r /etc/skel/. "$root$HOST_HOME"
mkdir -p "$root$HOST_HOME/.ssh"
printf '%s\n' "$AUTHORIZED_KEYS" > "$root$HOST_HOME/.ssh/authorized_keys"
printf '%s\n' "$OWN_KEY" > "$root$HOST_HOME/.ssh/id_ed25519"
chmod -R go= "$root$HOST_HOME/.ssh"
chroot "$root" chown -R "$HOST_USER:" "$HOST_HOME"

hostname "$HOST_NAME"
printf '127.0.0.1 localhost\n%s %s\n' "$HOST_ADDRESS" "$HOST_NAME" > "$root/etc/hosts"
# Refused at once, where the machine's servers would keep everybody waiting.
rm -f "$root/etc/resolv.conf"
echo 'nameserver 127.0.0.1' > "$root/etc/resolv.conf"

rm -f "$root"/etc/ssh/ssh_host_*
ssh-keygen -q -t ed25519 -N '' -f "$root/etc/ssh/ssh_host_ed25519_key"
cat > "$root/etc/ssh/sshd_config" <<'END'
PermitRootLogin prohibit-password
PasswordAuthentication no
UsePAM no
UseDNS no
MaxSessions 100
MaxStartups 100
PidFile /run/sshd.pid
END

cd "$root"
pivot_root . mnt
exec chroot . /usr/bin/env -i "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin" /bin/bash -c "
umount -l /mnt
ulimit -n 65536
echo host is ready
exec $SSHD -D -e"

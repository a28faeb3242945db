"""The restricted Pod Security Standard of Kubernetes 1.32, as far as it is about Linux."""

from collections.abc import Iterator

from tests.k8s.rendered import Object, Pod

VOLUMES = {"configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim", "projected", "secret"}
SAFE_SYSCTLS = {
    *("kernel.shm_rmid_forced", "net.ipv4.ip_local_port_range", "net.ipv4.ip_local_reserved_ports"),
    *("net.ipv4.ip_unprivileged_port_start", "net.ipv4.ping_group_range", "net.ipv4.tcp_fin_timeout"),
    *("net.ipv4.tcp_keepalive_intvl", "net.ipv4.tcp_keepalive_probes", "net.ipv4.tcp_keepalive_time"),
    "net.ipv4.tcp_syncookies",
}


def violations(pod: Pod) -> list[str]:
    found = list(_of_pod(pod.spec))
    for each in pod.containers:
        found += [f"{each['name']}: {why}" for why in _of_container(each, pod.spec.get("securityContext", {}))]
    return found


def _of_pod(spec: Object) -> Iterator[str]:
    yield from (f"{key} is set" for key in ("hostNetwork", "hostPID", "hostIPC") if spec.get(key))
    for volume in spec.get("volumes", []):
        yield from (f"volume {volume['name']} is of {kind}" for kind in set(volume) - {"name"} - VOLUMES)
    context = spec.get("securityContext", {})
    for sysctl in context.get("sysctls", []):
        if sysctl["name"] not in SAFE_SYSCTLS:
            yield f"{sysctl['name']} is no safe sysctl"
    yield from (f"{key} is set" for key in ("seLinuxOptions", "windowsOptions") if key in context)


def _of_container(each: Object, of_pod: Object) -> Iterator[str]:
    context = each.get("securityContext", {})

    def said(key: str) -> object:
        return context.get(key, of_pod.get(key))

    capabilities = context.get("capabilities", {})
    if context.get("privileged"):
        yield "is privileged"
    if context.get("allowPrivilegeEscalation") is not False:
        yield "may escalate its privileges"
    if capabilities.get("drop") != ["ALL"] or set(capabilities.get("add", [])) - {"NET_BIND_SERVICE"}:
        yield "keeps capabilities"
    if said("runAsNonRoot") is not True or said("runAsUser") == 0:
        yield "may run as root"
    profile = said("seccompProfile")
    if not isinstance(profile, dict) or profile.get("type") not in ("RuntimeDefault", "Localhost"):
        yield "has no seccomp profile"
    if context.get("procMount", "Default") != "Default":
        yield "has another procMount"
    yield from (f"{key} is set" for key in ("seLinuxOptions", "windowsOptions") if key in context)
    yield from (f"port {port['containerPort']} is of the host" for port in each.get("ports", []) if "hostPort" in port)
    hooks = [each.get("lifecycle", {}).get(key, {}) for key in ("postStart", "preStop")]
    probes = [each.get(f"{key}Probe", {}) for key in ("startup", "liveness", "readiness")]
    for action in [*hooks, *probes]:
        if "host" in action.get("httpGet", {}) or "host" in action.get("tcpSocket", {}):
            yield "asks another host"

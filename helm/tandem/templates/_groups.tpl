{{/* For how many seconds a gateway's pod may end. */}}
{{- define "tandem.gatewayGrace" -}}
{{- $gateway := .Values.gateway -}}
{{- $settings := default dict .Values.config.gateway -}}
{{- $drain := ternary $settings.drain_s 120 (hasKey $settings "drain_s") -}}
{{- $least := max 60 (int (addf (ceil $drain) 40)) -}}
{{- $grace := int (default $least $gateway.terminationGracePeriodSeconds) -}}
{{- if lt $grace (int (addf (ceil $drain) 20)) -}}
{{- fail (printf "gateway.terminationGracePeriodSeconds: %d must be at least config.gateway.drain_s %v and 20 s for streams to move; leave it out for %d" $grace $drain $least) -}}
{{- end -}}
{{- $grace -}}
{{- end -}}

{{/* The pods of the gateways. */}}
{{- define "tandem.gatewayPod" -}}
{{- $gateway := .Values.gateway -}}
{{- $grace := include "tandem.gatewayGrace" . | int -}}
{{- $ports := dict "grpc" $gateway.port "admin" $gateway.adminPort "metrics" 8080 "serve" 8000 -}}
{{- if $gateway.console -}}{{- $_ := set $ports "console" $gateway.consolePort -}}{{- end -}}
{{- if $gateway.http -}}{{- $_ := set $ports "http" $gateway.httpPort -}}{{- end -}}
{{- $probed := $gateway.port -}}
{{- $files := include "tandem.authFiles" . | fromYamlArray -}}
{{- $volumes := include "tandem.fileVolumes" $files | fromYamlArray -}}
{{- $mounts := list -}}
{{- range $files -}}
{{- $mounts = append $mounts (dict "name" .name "mountPath" (printf "/tandem/secrets/%s" .name) "readOnly" true) -}}
{{- end -}}
{{- if $gateway.tls.enabled -}}
{{- $secret := required "gateway.tls.secretName: must be given with gateway.tls.enabled: a Secret of the type kubernetes.io/tls" $gateway.tls.secretName -}}
{{- $volumes = append $volumes (dict "name" "tls" "secret" (dict "secretName" $secret "defaultMode" 0440)) -}}
{{- $mounts = append $mounts (dict "name" "tls" "mountPath" "/tandem/secrets/tls" "readOnly" true) -}}
{{- $probed = $gateway.healthPort -}}
{{- $_ := set $ports "health" $probed -}}
{{- end -}}
{{- $readiness := dict "grpc" (dict "port" $probed "service" "tandem.v1.Inference") "periodSeconds" 5 "timeoutSeconds" 2 "failureThreshold" 2 -}}
{{- $limits := include "tandem.limits" $gateway.resources | fromYaml -}}
{{- include "tandem.rayPod" (dict "root" . "part" "gateway" "pod" $gateway "limits" $limits "ports" $ports "grace" $grace "drain" (sub $grace 10) "readiness" $readiness "volumes" $volumes "mounts" $mounts) -}}
{{- end -}}

{{/* The pods of a pool. Call with (list $ name pool). */}}
{{- define "tandem.poolPod" -}}
{{- $root := index . 0 -}}{{- $name := index . 1 -}}{{- $pool := index . 2 -}}
{{- $given := dict "cpu" (default $pool.sized.cpu $pool.resources.cpu) "memory" $pool.resources.memory "extra" $pool.resources.extra -}}
{{- $limits := include "tandem.limits" $given | fromYaml -}}
{{- $pod := $pool -}}
{{- if gt (int $pool.sized.gpus) 0 -}}
{{- $_ := set $limits $pool.gpu.resource (toString $pool.sized.gpus) -}}
{{- with $pool.gpu.product -}}
{{- $_ := set $pod "nodeSelector" (merge (dict "nvidia.com/gpu.product" .) (default dict $pod.nodeSelector)) -}}
{{- end -}}
{{- end -}}
{{- $capabilities := list -}}
{{- with $pool.rdma.resource -}}
{{- $_ := set $limits . (toString $pool.rdma.count) -}}
{{- $capabilities = list "IPC_LOCK" -}}
{{- end -}}
{{- with $pool.hugePages.size -}}
{{- $amount := required (printf "pools.%s.hugePages.amount: must be given with hugePages.size" $name) $pool.hugePages.amount -}}
{{- $_ := set $limits (printf "hugepages-%s" .) $amount -}}
{{- end -}}
{{- $volumes := list -}}{{- $mounts := list -}}{{- $host := dict -}}
{{- if (default dict $root.Values.config.store).nvme_gb -}}
{{- if ne (len $pool.nvme.volume) 1 -}}
{{- $chosen := omit $pool.nvme.volume "emptyDir" -}}
{{- $_ := set $pool.nvme "volume" $chosen -}}
{{- end -}}
{{- if ne (len $pool.nvme.volume) 1 -}}
{{- fail (printf "pools.%s.nvme.volume: exactly one volume source must be given" $name) -}}
{{- end -}}
{{- $volumes = append $volumes (merge (dict "name" "nvme") $pool.nvme.volume) -}}
{{- $mounts = append $mounts (dict "name" "nvme" "mountPath" "/tandem/nvme") -}}
{{- if $pool.nvme.volume.hostPath -}}
{{- /* The store names its folder after the host, and shall find it again in another pod of the node. */ -}}
{{- $_ := set $host "hostname" (printf "%s-%s" (include "tandem.fullname" $root) $name | trunc 63 | trimSuffix "-") -}}
{{- end -}}
{{- end -}}
{{- if $pool.hostNetwork -}}
{{- $_ := set $host "hostNetwork" true -}}{{- $_ := set $host "dnsPolicy" "ClusterFirstWithHostNet" -}}
{{- $_ := unset $host "hostname" -}}
{{- end -}}
{{- if $pool.hostIPC -}}{{- $_ := set $host "hostIPC" true -}}{{- end -}}
{{- $alive := "wget -T 2 -q -O- http://localhost:52365/api/local_raylet_healthz | grep success" -}}
{{- $readiness := dict "exec" (dict "command" (list "bash" "-c" $alive)) "initialDelaySeconds" 5 "periodSeconds" 5 "timeoutSeconds" 5 "failureThreshold" 3 -}}
{{- $ports := dict "metrics" 8080 "serve" 8000 -}}
{{- include "tandem.rayPod" (dict "root" $root "part" "pool" "pool" $name "usesGpus" (gt (int $pool.sized.gpus) 0) "pod" $pod "limits" $limits "ports" $ports "grace" $pool.sized.grace "drain" (sub $pool.sized.grace 10) "readiness" $readiness "volumes" $volumes "mounts" $mounts "capabilities" $capabilities "host" $host) -}}
{{- end -}}

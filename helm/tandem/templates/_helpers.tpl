{{/* Names and labels. */}}

{{- define "tandem.fullname" -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- $full := printf "%s-%s" .Release.Name $name -}}
{{- if contains $name .Release.Name -}}{{- $full = .Release.Name -}}{{- end -}}
{{- default $full .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{- define "tandem.selector" -}}
tandem.io/release: {{ include "tandem.fullname" . }}
{{- end -}}

{{- define "tandem.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
app.kubernetes.io/name: {{ default .Chart.Name .Values.nameOverride }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{ include "tandem.selector" . }}
{{- with .Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* Of the pods that are not Ray's. Call with (list $ "component"). */}}
{{- define "tandem.componentSelector" -}}
{{ include "tandem.selector" (index . 0) }}
tandem.io/part: {{ index . 1 }}
{{- end -}}

{{/* The names of a Service in the cluster's DNS. Call with (list $ "service"). As a YAML list. */}}
{{- define "tandem.hostNames" -}}
{{- $root := index . 0 -}}{{- $host := index . 1 -}}
{{- $inside := printf "%s.%s" $host $root.Release.Namespace -}}
{{- list $host $inside (printf "%s.svc" $inside) (printf "%s.svc.%s" $inside $root.Values.clusterDomain) | toYaml -}}
{{- end -}}

{{- define "tandem.serviceAccount" -}}
{{- $root := index . 0 -}}{{- $part := index . 1 -}}
{{- if $root.Values.serviceAccount.create -}}
{{- printf "%s-%s" (include "tandem.fullname" $root) $part -}}
{{- else -}}
{{- ternary $root.Values.serviceAccount.headName $root.Values.serviceAccount.workerName (eq $part "head") -}}
{{- end -}}
{{- end -}}

{{/* Pools, each with what `poolDefaults` says merged under it and what follows from it computed. As YAML, worked out
once. */}}
{{- define "tandem.pools" -}}
{{- $root := . -}}
{{- if not (hasKey .Values "sizedPools") -}}
{{- $pools := dict -}}
{{- range $name, $given := .Values.pools -}}
{{- if $given -}}
{{- $pool := mergeOverwrite (deepCopy $root.Values.poolDefaults) (deepCopy $given) -}}
{{- $_ := set $pools $name (include "tandem.sizedPool" (list $root $name $pool) | fromYaml) -}}
{{- end -}}
{{- end -}}
{{- if not $pools -}}{{- fail "pools: at least one pool is needed" -}}{{- end -}}
{{- $roles := list -}}
{{- range $pools -}}{{- $roles = append $roles .config.role -}}{{- end -}}
{{- if not (or (has "decode" $roles) (has "both" $roles)) -}}
{{- fail "pools: at least one needs config.role decode or both: nothing else continues a prompt" -}}
{{- end -}}
{{- $_ := set .Values "sizedPools" (toYaml $pools) -}}
{{- end -}}
{{- .Values.sizedPools -}}
{{- end -}}

{{/* The pool with sized: {cpu, gpus, pods, minPods, maxPods, grace}. Call with (list $ name pool). */}}
{{- define "tandem.sizedPool" -}}
{{- $root := index . 0 -}}{{- $name := index . 1 -}}{{- $pool := index . 2 -}}
{{- $c := $pool.config -}}
{{- $where := printf "pools.%s" $name -}}
{{- if not (regexMatch "^[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?$" $name) -}}
{{- fail (printf "%s: a pool's name has lower-case letters, digits and dashes, at most 40" $where) -}}
{{- end -}}
{{- if not $c.cpus_per_rank -}}
{{- fail (printf "%s.config.cpus_per_rank: must be given: it sizes the pods, and nobody else shares out CPUs" $where) -}}
{{- end -}}
{{- $tp := int (default (default 1 $c.ep) $c.tp) -}}{{- $pp := int (default 1 $c.pp) -}}
{{- $replicas := int (default 1 $c.replicas) -}}
{{- $perPod := int (default 1 $pool.replicasPerPod) -}}
{{- $stages := int (default $pp $pool.stagesPerPod) -}}
{{- if and (lt $stages $pp) (gt $perPod 1) -}}
{{- fail (printf "%s: with stagesPerPod below pp, replicasPerPod must be 1" $where) -}}
{{- end -}}
{{- if mod $pp $stages -}}
{{- fail (printf "%s.stagesPerPod: %d does not divide pp %d" $where $stages $pp) -}}
{{- end -}}
{{- $devices := default (list) $c.devices -}}
{{- $isCuda := ternary (has "cuda" $devices) (eq (default "cpu" $c.device) "cuda") (gt (len $devices) 0) -}}
{{- $gpusPerRank := ternary 1.0 0.0 $isCuda -}}
{{- if not (kindIs "invalid" $c.gpus_per_rank) -}}{{- $gpusPerRank = $c.gpus_per_rank -}}{{- end -}}
{{- if not $isCuda -}}{{- $gpusPerRank = 0.0 -}}{{- end -}}
{{- $ranks := mul $tp $stages $perPod -}}
{{- $cpu := ceil (addf (mulf $ranks $c.cpus_per_rank) (mulf 0.05 $perPod)) | int -}}
{{- $gpus := ceil (mulf $ranks $gpusPerRank) | int -}}
{{- if gt $gpus (int $pool.gpu.perNode) -}}
{{- fail (printf "%s.config.tp: a pod asks for %d GPUs, and a node has %d (%s.gpu.perNode): the ranks of a stage share a node, because tp over nodes has no transport; use pp with stagesPerPod below it, fewer replicasPerPod, or set gpu.perNode where nodes have more" $where $gpus (int $pool.gpu.perNode) $where) -}}
{{- end -}}
{{- $podsOfReplica := div $pp $stages -}}
{{- $needed := div (add (mul $replicas $podsOfReplica) (sub $perPod 1)) $perPod -}}
{{- $pods := int (default $needed $pool.pods) -}}
{{- $scaling := default dict $root.Values.config.scaling -}}
{{- $limits := default dict (get (default dict $scaling.pools) $name) -}}
{{- $wanted := div (add (mul (int (default 1 $limits.max)) $podsOfReplica) (sub $perPod 1)) $perPod -}}
{{- $maxPods := int (default (max $pods $wanted) $pool.maxPods) -}}
{{- $minPods := min $pods $maxPods | int -}}
{{- if not (kindIs "invalid" $pool.minPods) -}}{{- $minPods = int $pool.minPods -}}{{- end -}}
{{- if or (lt $maxPods $pods) (gt $minPods $pods) -}}
{{- fail (printf "%s: minPods %d, pods %d and maxPods %d must not fall" $where $minPods $pods $maxPods) -}}
{{- end -}}
{{- include "tandem.checkAutoscaler" (list $root $name $pods $wanted $maxPods $limits) -}}
{{- include "tandem.checkMemory" (list $root $name $pool $ranks $perPod) -}}
{{- $drain := default 10 $c.drain_s -}}
{{- $least := int (addf (ceil $drain) 40) -}}
{{- $grace := int (default $least $pool.terminationGracePeriodSeconds) -}}
{{- if le $grace (int (addf (ceil $drain) 10)) -}}
{{- fail (printf "%s.terminationGracePeriodSeconds: %d must be more than drain_s %v and 10 s for the end; leave it out for %d" $where $grace $drain $least) -}}
{{- end -}}
{{- $sized := dict "cpu" $cpu "gpus" $gpus "pods" $pods "minPods" $minPods "maxPods" $maxPods "grace" $grace "replicas" $replicas -}}
{{- set $pool "sized" $sized | toYaml -}}
{{- end -}}

{{/* Whether there can be pods for the replicas that the pool's own autoscaler may order. */}}
{{- define "tandem.checkAutoscaler" -}}
{{- $root := index . 0 -}}{{- $name := index . 1 -}}{{- $pods := int (index . 2) -}}{{- $wanted := int (index . 3) -}}
{{- $maxPods := int (index . 4) -}}{{- $limits := index . 5 -}}
{{- if and $limits (default dict $root.Values.config.scaling).autoscale -}}
{{- $seen := printf "config.scaling.pools.%s.max: %d replicas take %d pods" $name (int (default 1 $limits.max)) $wanted -}}
{{- if and (not $root.Values.autoscaler.enabled) (gt $wanted $pods) -}}
{{- fail (printf "%s, there are %d, and nobody adds any: set autoscaler.enabled, raise pools.%s.pods to %d, or lower max" $seen $pods $name $wanted) -}}
{{- end -}}
{{- if and $root.Values.autoscaler.enabled (gt $wanted $maxPods) -}}
{{- fail (printf "%s, and pools.%s.maxPods allows %d: raise it, leave it out, or lower max" $seen $name $maxPods) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Whether a pod has the memory that is taken for certain, whatever the model: a replica checks the rest when it
starts. The sizes of processes are those of cluster/serve/memory.py and workers/model/rank_memory.py. */}}
{{- define "tandem.checkMemory" -}}
{{- $root := index . 0 -}}{{- $name := index . 1 -}}{{- $pool := index . 2 -}}
{{- $store := mulf 1e9 (default 0 (default dict $root.Values.config.store).dram_gb) -}}
{{- $processes := addf (mulf 350e6 (index . 3)) (mulf 150e6 (index . 4)) -}}
{{- $huge := ternary (include "tandem.bytes" (default "0" $pool.hugePages.amount)) "0" (eq $pool.hugePages.size "2Mi") | float64 -}}
{{- /* Reserved pages are no memory of the container; too few of them are not used. */ -}}
{{- $ofGroup := ternary 0.0 $store (ge $huge $store) -}}
{{- $needed := addf $ofGroup $processes -}}
{{- $memory := include "tandem.bytes" $pool.resources.memory | float64 -}}
{{- if gt $needed $memory -}}
{{- $where := printf "pools.%s.resources.memory" $name -}}
{{- fail (printf "%s: %v holds %.1f GB, and a pod takes more than %.1f GB (config.store.dram_gb %.1f, processes %.1f): raise it to %.0fGi and what the model takes, or lower config.store.dram_gb" $where $pool.resources.memory (divf $memory 1e9) (divf $needed 1e9) (divf $ofGroup 1e9) (divf $processes 1e9) (ceil (divf $needed 1073741824))) -}}
{{- end -}}
{{- end -}}

{{/* A quantity of Kubernetes as a number of bytes. */}}
{{- define "tandem.bytes" -}}
{{- $text := toString . -}}
{{- $number := regexFind "^[0-9.]+" $text | float64 -}}
{{- $units := dict "" 1.0 "m" 1e-3 "k" 1e3 "M" 1e6 "G" 1e9 "T" 1e12 "P" 1e15 "E" 1e18 "Ki" 1024.0 "Mi" 1048576.0 "Gi" 1073741824.0 "Ti" 1099511627776.0 "Pi" 1125899906842624.0 "Ei" 1152921504606846976.0 -}}
{{- mulf $number (get $units (regexFind "[a-zA-Z]*$" $text)) -}}
{{- end -}}

{{/* The image of pods with ("cuda") or without ("cpu") GPUs. Call with (list $ kind). */}}
{{- define "tandem.image" -}}
{{- $root := index . 0 -}}{{- $kind := index . 1 -}}
{{- $image := $root.Values.image -}}
{{- $tag := default (printf "%s-%s" $root.Chart.AppVersion $kind) $image.tag -}}
{{- $digest := $image.digest -}}
{{- if eq $kind "cpu" -}}
{{- $tag = default $tag $image.cpuTag -}}
{{- $digest = default $digest $image.cpuDigest -}}
{{- end -}}
{{- include "tandem.reference" (list $root (dict "repository" $image.repository "tag" $tag "digest" $digest)) -}}
{{- end -}}

{{/* What names an image: the tag is for readers where there is a digest. The registry of `global` takes the place of the
one in the repository: what stands before the first slash, where that has a dot or a port, or is localhost. Call with
(list $ image). */}}
{{- define "tandem.reference" -}}
{{- $registry := (index . 0).Values.global.imageRegistry -}}{{- $image := index . 1 -}}
{{- $repository := $image.repository -}}
{{- if $registry -}}
{{- $repository = printf "%s/%s" (trimSuffix "/" $registry) (regexReplaceAll "^(localhost|[^/]*[.:][^/]*)/" $repository "") -}}
{{- end -}}
{{- printf "%s:%s" $repository $image.tag -}}{{- with $image.digest -}}{{- printf "@%s" . -}}{{- end -}}
{{- end -}}

{{/* The Secrets by which all pods pull their images; nothing where there are none. */}}
{{- define "tandem.pullSecrets" -}}
{{- $names := list -}}
{{- range concat .Values.global.imagePullSecrets .Values.image.pullSecrets -}}
{{- $names = append $names (ternary . (get (ternary dict . (kindIs "string" .)) "name") (kindIs "string" .)) -}}
{{- end -}}
{{- with uniq $names -}}
imagePullSecrets:
{{- range . }}
  - name: {{ . }}
{{- end }}
{{- end -}}
{{- end -}}

{{/* The Ray resource that ties a pool's replicas to its pods. */}}
{{- define "tandem.poolResource" -}}
tandem_pool_{{ . | replace "-" "_" }}
{{- end -}}

{{- define "tandem.clusterSecretName" -}}
{{- default (printf "%s-cluster" (include "tandem.fullname" .)) .Values.clusterSecret.existingSecret -}}
{{- end -}}

{{- define "tandem.raySecretName" -}}
{{- default (printf "%s-ray" (include "tandem.fullname" .)) .Values.rayAuth.existingSecret -}}
{{- end -}}

{{/* Redis: the Secret with URL and password, its keys, and the address for Ray. */}}
{{- define "tandem.redis" -}}
{{- $name := include "tandem.fullname" . -}}
{{- if eq .Values.redis.mode "bundled" -}}
secret: {{ default (printf "%s-redis" $name) .Values.redis.bundled.existingSecret }}
urlKey: url
passwordKey: password
usernameKey: ""
address: {{ printf "%s%s-redis:6379" (ternary "rediss://" "" .Values.redis.bundled.tls.enabled) $name }}
{{- if .Values.redis.bundled.tls.enabled }}
authority: {secret: {{ default (printf "%s-redis-tls" $name) .Values.redis.bundled.tls.existingSecret }}, key: ca.crt}
{{- end }}
{{- else -}}
{{- $external := .Values.redis.external -}}
secret: {{ required "redis.external.secretName: must be given with redis.mode external: the Secret with the server's URL" $external.secretName }}
urlKey: {{ $external.urlKey }}
passwordKey: {{ $external.passwordKey | quote }}
usernameKey: {{ $external.usernameKey | quote }}
address: {{ required "redis.external.address: must be given with redis.mode external, as host:port" $external.address }}
{{- with $external.ca.secretName }}
authority: {secret: {{ . }}, key: {{ $external.ca.key }}}
{{- end }}
{{- end -}}
{{- end -}}

{{/* How a bundled server listens. Call with (list tls port). */}}
{{- define "tandem.redisPort" -}}
{{- if index . 0 -}}
port 0
tls-port {{ index . 1 }}
tls-cert-file /etc/redis-tls/tls.crt
tls-key-file /etc/redis-tls/tls.key
tls-ca-cert-file /etc/redis-tls/ca.crt
tls-auth-clients no
{{- else -}}
port {{ index . 1 }}
{{- end -}}
{{- end -}}

{{/* What the model's volume is: claim and folder in it; nothing when it is in the image. */}}
{{- define "tandem.model" -}}
{{- if eq .Values.model.source "pvc" -}}
claim: {{ required "model.pvc.claim: must be given with model.source pvc" .Values.model.pvc.claim }}
subPath: {{ .Values.model.pvc.subPath | quote }}
marker: ""
{{- else if eq .Values.model.source "download" -}}
{{- $download := .Values.model.download -}}
{{- if not (or $download.repo $download.command) -}}
{{- fail "model.download.repo: must be given with model.source download, as org/name, or model.download.command" -}}
{{- end -}}
{{- $what := printf "%s@%s" (default (toJson $download.command | sha256sum | trunc 16) $download.repo) $download.revision -}}
claim: {{ printf "%s-model" (include "tandem.fullname" .) }}
subPath: {{ $what | sha256sum | trunc 16 | quote }}
marker: {{ $what | quote }}
{{- end -}}
{{- end -}}

{{/* The volume in which a node keeps what belongs to the model; nothing where none is given. */}}
{{- define "tandem.modelCache" -}}
{{- $volume := .Values.model.cache.volume -}}
{{- if gt (len $volume) 1 -}}
{{- fail "model.cache.volume: exactly one volume source must be given" -}}
{{- end -}}
{{- if and (eq .Values.model.source "nodes") (not $volume) -}}
{{- fail "model.cache.volume: must be given with model.source nodes, such as {hostPath: {path: /var/lib/tandem}}" -}}
{{- end -}}
{{- with $volume -}}{{- merge (dict "name" "model-cache") . | toYaml -}}{{- end -}}
{{- end -}}

{{/* What the cluster's file says of the model: where it is, or by which name each node fetches it. */}}
{{- define "tandem.modelConfig" -}}
{{- $download := .Values.model.download -}}
{{- $nodes := eq .Values.model.source "nodes" -}}
{{- if and $download.file (not $nodes) -}}
{{- fail "model.download.file: one file is fetched with model.source nodes only" -}}
{{- end -}}
{{- if $nodes -}}
{{- if or $download.command (not $download.repo) -}}
{{- fail "model.download.repo: must be given with model.source nodes, as org/name, without model.download.command" -}}
{{- end -}}
{{- if not (regexMatch "^[0-9a-f]{40}$" $download.revision) -}}
{{- fail "model.download.revision: must be a commit with model.source nodes, so that all nodes serve the same files" -}}
{{- end -}}
model: {{ printf "%s@%s" $download.repo $download.revision }}{{ with $download.file }}:{{ . }}{{ end }}
download:
  cache_folder: /tandem/model-cache/hub
  {{- with $download.endpoint }}
  endpoint: {{ . }}
  {{- end }}
  {{- if $download.tokenSecret.name }}
  token_file: /tandem/secrets/hub-token/token
  {{- end }}
{{- else -}}
model: {{ .Values.model.path }}
{{- end }}
{{- if include "tandem.modelCache" . }}
model_cache: /tandem/model-cache/made
{{- end }}
{{- end -}}

{{- define "tandem.modelName" -}}
{{- $name := .Values.model.name -}}
{{- if and (not $name) (eq .Values.model.source "nodes") -}}
{{- $name = base (default .Values.model.download.repo (trimSuffix ".gguf" .Values.model.download.file)) -}}
{{- end -}}
{{- if and (not $name) (eq .Values.model.source "download") -}}
{{- if and .Values.model.download.command (not .Values.model.download.repo) -}}
{{- fail "model.name: must be given with model.download.command and without model.download.repo, after which the model would be called" -}}
{{- end -}}
{{- $name = base .Values.model.download.repo -}}
{{- end -}}
{{- $name -}}
{{- end -}}

{{/* Ports of Ray that are free ones unless they are given: fixed, so that policies can name them. By the parameter of
`ray start`. */}}
{{- define "tandem.rayPorts" -}}
node-manager-port: "9931"
object-manager-port: "9932"
runtime-env-agent-port: "9933"
dashboard-agent-grpc-port: "9934"
dashboard-agent-listen-port: "52365"
{{- end -}}

{{/* The parameters of `ray start` that all nodes have. */}}
{{- define "tandem.rayNode" -}}
{{ include "tandem.rayPorts" . }}
min-worker-port: "10002"
max-worker-port: "19999"
object-store-memory: "134217728"
{{- end -}}

{{- define "tandem.operatorPeer" -}}
- namespaceSelector:
    matchLabels:
      kubernetes.io/metadata.name: {{ .Values.networkPolicy.operatorNamespace }}
  podSelector:
    matchLabels:
      {{- toYaml .Values.networkPolicy.operatorPodLabels | nindent 6 }}
{{- end -}}

{{- define "tandem.gatewaySelector" -}}
{{ include "tandem.selector" . }}
ray.io/node-type: worker
ray.io/group: gateway
{{- with .Values.gateway.service.rayCluster }}
ray.io/cluster: {{ . }}
{{- end }}
{{- end -}}

{{- define "tandem.monitorLabels" -}}
{{ include "tandem.labels" . }}
{{- with .Values.monitoring.labels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "tandem.relabelings" -}}
- sourceLabels: [__meta_kubernetes_pod_label_ray_io_group]
  targetLabel: ray_group
- sourceLabels: [__meta_kubernetes_pod_label_ray_io_cluster]
  targetLabel: ray_cluster
{{- end -}}

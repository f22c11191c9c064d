{{/*
The template of a Ray pod. Call with a dict:
  root, part (head, gateway, pool), pool (name), pod (values of the group), limits (of the Ray container),
  usesGpus (which image), ports, grace, drain (seconds), readiness (probe or ""), volumes, mounts, capabilities, host (hostNetwork,
  hostIPC, hostname).
*/}}
{{- define "tandem.rayPod" -}}
{{- $root := .root -}}
{{- $pod := .pod -}}
{{- $model := include "tandem.model" $root | fromYaml -}}
{{- $image := include "tandem.image" (list $root (ternary "cuda" "cpu" (default false .usesGpus))) -}}
{{- $cache := include "tandem.modelCache" $root | fromYaml -}}
{{- $redis := include "tandem.redis" $root | fromYaml -}}
{{- $context := deepCopy $root.Values.containerSecurityContext -}}
{{- $shared := include "tandem.sharedFiles" (list $root .part) | fromYamlArray -}}
{{- with .capabilities -}}
{{- $_ := set $context "capabilities" (mergeOverwrite (default dict $context.capabilities) (dict "add" .)) -}}
{{- end -}}
{{- $limits := .limits -}}
{{- $group := ternary (printf "pools.%s" (default "" .pool)) .part (eq .part "pool") -}}
{{- $requests := include "tandem.requests" (list $limits $pod.resources.requests (printf "%s.resources" $group)) -}}
{{- $own := list "wait-model" (ternary "ray-head" "ray-worker" (eq .part "head")) -}}
{{- include "tandem.checkNames" (list (printf "%s.initContainers" $group) $pod.initContainers $own) -}}
{{- include "tandem.checkNames" (list (printf "%s.sidecars" $group) $pod.sidecars $own) -}}
{{- $volumes := list "tmp" "shared-memory" "cluster-secret" "redis-secret" "model" "model-cache" -}}
{{- range concat (include "tandem.fileVolumes" $shared | fromYamlArray) (default list .volumes) -}}
{{- $volumes = append $volumes .name -}}
{{- end -}}
{{- include "tandem.checkNames" (list (printf "%s.volumes" $group) $pod.volumes $volumes) -}}
{{- $security := deepCopy $root.Values.podSecurityContext -}}
{{- $free := $root.Values.networkPolicy.freePorts -}}
{{- if $free.pinned -}}
{{- if default dict .host -}}{{- if .host.hostNetwork -}}
{{- fail (printf "networkPolicy.freePorts.pinned: pods with %s.hostNetwork have the ports of their node: set net.ipv4.ip_local_port_range there, and pinned to false" $group) -}}
{{- end -}}{{- end -}}
{{- $range := dict "name" "net.ipv4.ip_local_port_range" "value" (printf "%d %d" (int $free.first) (int $free.last)) -}}
{{- $_ := set $security "sysctls" (append (default list $security.sysctls) $range) -}}
{{- end -}}
metadata:
  labels:
    {{- include "tandem.selector" $root | nindent 4 }}
    app.kubernetes.io/instance: {{ $root.Release.Name }}
    tandem.io/part: {{ .part }}
    {{- with .pool }}
    tandem.io/pool: {{ . }}
    {{- end }}
    {{- with $root.Values.commonLabels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
    {{- with $pod.labels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- with $pod.annotations }}
  annotations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  serviceAccountName: {{ include "tandem.serviceAccount" (list $root (ternary "head" "worker" (eq .part "head"))) }}
  automountServiceAccountToken: {{ and (eq .part "head") $root.Values.autoscaler.enabled }}
  enableServiceLinks: false
  {{- with .grace }}
  terminationGracePeriodSeconds: {{ . }}
  {{- end }}
  securityContext:
    {{- toYaml $security | nindent 4 }}
  {{- include "tandem.pullSecrets" $root | nindent 2 }}
  {{- with .host }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
  {{- range $field := list "nodeSelector" "tolerations" "affinity" "topologySpreadConstraints" "priorityClassName" "runtimeClassName" "schedulerName" }}
  {{- with get $pod $field }}
  {{ $field }}:
    {{- if kindIs "string" . }} {{ . }}{{ else }}{{ toYaml . | nindent 4 }}{{ end }}
  {{- end }}
  {{- end }}
  {{- if or $model.marker $pod.initContainers }}
  initContainers:
    {{- if $model.marker }}
    - name: wait-model
      image: {{ $image }}
      imagePullPolicy: {{ $root.Values.image.pullPolicy }}
      terminationMessagePolicy: FallbackToLogsOnError
      command:
        - bash
        - -c
        {{- include "tandem.waitModel" $root | nindent 8 }}
      env:
        - name: MODEL
          value: {{ $model.marker | quote }}
        - name: MODEL_PATH
          value: {{ $root.Values.model.path }}
      resources:
        limits: {cpu: 100m, memory: 64Mi}
        requests: {cpu: 100m, memory: 64Mi}
      securityContext:
        {{- toYaml $root.Values.containerSecurityContext | nindent 8 }}
      volumeMounts:
        - name: model
          mountPath: {{ $root.Values.model.path }}
          subPath: {{ $model.subPath }}
          readOnly: true
    {{- end }}
    {{- with $pod.initContainers }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- end }}
  containers:
    - name: {{ ternary "ray-head" "ray-worker" (eq .part "head") }}
      image: {{ $image }}
      imagePullPolicy: {{ $root.Values.image.pullPolicy }}
      env:
        {{- include "tandem.environment" $root | nindent 8 }}
        {{- if $redis.authority }}
        - name: RAY_REDIS_CA_CERT
          value: /tandem/secrets/redis-ca/ca.crt
        {{- end }}
        {{- with $pod.env }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      {{- with $pod.envFrom }}
      envFrom:
        {{- toYaml . | nindent 8 }}
      {{- end }}
      ports:
        {{- range $name, $port := .ports }}
        - name: {{ $name }}
          containerPort: {{ $port }}
        {{- end }}
      resources:
        limits:
          {{- toYaml .limits | nindent 10 }}
        requests:
          {{- $requests | nindent 10 }}
      securityContext:
        {{- toYaml $context | nindent 8 }}
      {{- with .readiness }}
      readinessProbe:
        {{- toYaml . | nindent 8 }}
      {{- end }}
      {{- if ne .part "head" }}
      lifecycle:
        preStop:
          exec:
            command:
              - bash
              - -c
              {{- include "tandem.leave" .drain | nindent 14 }}
      {{- end }}
      volumeMounts:
        - name: tmp
          mountPath: /tmp
        - name: shared-memory
          mountPath: /dev/shm
        - name: cluster-secret
          mountPath: /tandem/secrets/cluster
          readOnly: true
        - name: redis-secret
          mountPath: /tandem/secrets/redis
          readOnly: true
        {{- range $shared }}
        - name: {{ .name }}
          mountPath: /tandem/secrets/{{ .name }}
          readOnly: true
        {{- end }}
        {{- if $model.claim }}
        - name: model
          mountPath: {{ $root.Values.model.path }}
          {{- with $model.subPath }}
          subPath: {{ . }}
          {{- end }}
          readOnly: true
        {{- end }}
        {{- if $cache }}
        - name: model-cache
          mountPath: /tandem/model-cache
        {{- end }}
        {{- with .mounts }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
        {{- with $pod.volumeMounts }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
    {{- with $pod.sidecars }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  volumes:
    - name: tmp
      emptyDir: {}
    - name: shared-memory
      emptyDir:
        medium: Memory
        sizeLimit: {{ default "1Gi" $pod.sharedMemory }}
    - name: cluster-secret
      secret:
        secretName: {{ include "tandem.clusterSecretName" $root }}
        defaultMode: 0440
        items:
          - key: {{ $root.Values.clusterSecret.key }}
            path: secret
    - name: redis-secret
      secret:
        secretName: {{ $redis.secret }}
        defaultMode: 0440
        items:
          - key: {{ $redis.urlKey }}
            path: url
    {{- include "tandem.fileVolumes" $shared | nindent 4 }}
    {{- with $model.claim }}
    - name: model
      persistentVolumeClaim:
        claimName: {{ . }}
    {{- end }}
    {{- with $cache }}
    - {{- toYaml . | nindent 6 }}
    {{- end }}
    {{- with .volumes }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
    {{- with $pod.volumes }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
{{- end -}}

{{/* As `tandem serve` sets it for the processes below it. */}}
{{- define "tandem.environment" -}}
- name: RAY_USAGE_STATS_ENABLED
  value: "0"
- name: RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO
  value: "0"
- name: RAY_worker_niceness
  value: "0"
- name: RAY_DEDUP_LOGS_SKIP_REGEX
  value: A worker died or was killed|worker processes have been started
- name: MALLOC_ARENA_MAX
  value: "2"
- name: OMP_NUM_THREADS
  value: "1"
- name: TOKENIZERS_PARALLELISM
  value: "false"
- name: GRPC_VERBOSITY
  value: ERROR
- name: HOME
  value: /tmp
{{- if ne .Values.rayAuth.mode "token" }}
- name: RAY_AUTH_MODE
  value: disabled
{{- end }}
{{- end -}}

{{/* Before a worker's pod ends: Serve starts its replicas on other nodes and drains those on this one. */}}
{{- define "tandem.leave" -}}
- |
  ray drain-node --reason DRAIN_NODE_REASON_PREEMPTION --reason-message "the pod ends" \
    --deadline-remaining-seconds {{ . }} || exit 0
  for ((second = 0; second < {{ . }}; second++)); do
    grep -aqs "^ray::ServeReplica" /proc/[0-9]*/cmdline || exit 0
    sleep 1
  done
{{- end -}}

{{/* What a container asks for: its limits, where `requests` says no less. Call with (list limits requests path). */}}
{{- define "tandem.requests" -}}
{{- $limits := index . 0 -}}{{- $given := default dict (index . 1) -}}{{- $path := index . 2 -}}
{{- range $name, $amount := $given -}}
{{- $limit := get $limits $name -}}
{{- if not $limit -}}
{{- fail (printf "%s.requests.%s: has no limit; name it in %s too" $path $name (ternary $path (printf "%s.extra" $path) (regexMatch "^(model|redis)[.]" $path))) -}}
{{- end -}}
{{- if gt (include "tandem.bytes" $amount | float64) (include "tandem.bytes" $limit | float64) -}}
{{- fail (printf "%s.requests.%s: %v is more than its limit %v" $path $name $amount $limit) -}}
{{- end -}}
{{- end -}}
{{- mergeOverwrite (deepCopy $limits) (deepCopy $given) | toYaml -}}
{{- end -}}

{{/* Refuse what is given by a name that the chart has for something else. Call with (list path given names). */}}
{{- define "tandem.checkNames" -}}
{{- $path := index . 0 -}}{{- $taken := index . 2 -}}
{{- range index . 1 -}}
{{- if has .name $taken -}}
{{- fail (printf "%s: the name %s is the chart's own; choose another" $path .name) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "tandem.limits" -}}
{{- $limits := dict "cpu" (toString .cpu) "memory" .memory -}}
{{- range $name, $amount := .extra -}}{{- $_ := set $limits $name $amount -}}{{- end -}}
{{- $limits | toYaml -}}
{{- end -}}

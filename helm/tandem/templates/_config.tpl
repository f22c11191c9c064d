{{/* The text of serveConfigV2: the configuration of the Ray Serve deployment. */}}

{{- define "tandem.serveConfig" -}}
{{- $root := . -}}
proxy_location: EveryNode
http_options:
  host: 0.0.0.0
  port: 8000
applications:
  - name: {{ .Values.app }}
    import_path: cluster.serve.entrypoint:build
    # Nothing is served there: without any route Serve's proxies call themselves unready, and KubeRay asks them.
    route_prefix: /{{ .Values.app }}
    external_scaler_enabled: true
    args:
      secret_file: /tandem/secrets/cluster/secret
      redis_url_file: /tandem/secrets/redis/url
      config:
        {{- include "tandem.clusterConfig" . | nindent 8 }}
    deployments:
      - name: Gateway
        num_replicas: {{ .Values.gateway.replicas }}
        # The counts of the pools. Gateways and scaler take others without a restart; a num_replicas of the pools
        # would stop what was ordered since, and is refused.
        user_config:
          replicas:
            {{- range $name, $pool := include "tandem.pools" . | fromYaml }}
            {{ $name }}: {{ $pool.sized.replicas }}
            {{- end }}
{{- end -}}

{{/* The cluster's file. Counts of replicas are not in it, so that another count is no other configuration. A gateway
fills its pod, so the next one can start beside it only where `surge: true` says that there is a spare pod. */}}
{{- define "tandem.clusterConfig" -}}
{{- $config := deepCopy .Values.config -}}
{{- $gateway := dict "host" "auto" "port" .Values.gateway.port "resources" (dict "tandem_gateway" 1) -}}
{{- $_ := set $gateway "console_port" (ternary .Values.gateway.consolePort nil .Values.gateway.console) -}}
{{- $_ := set $gateway "admin_port" .Values.gateway.adminPort -}}
{{- $_ := set $gateway "http" (dict "port" (ternary .Values.gateway.httpPort nil .Values.gateway.http)) -}}
{{- $hosts := include "tandem.hostNames" (list . (printf "%s-admin" (include "tandem.fullname" .))) | fromYamlArray -}}
{{- $_ := set $gateway "console_hosts" (concat $hosts (default list (default dict $config.gateway).console_hosts)) -}}
{{- $_ := set $gateway "max_connection_age_s" .Values.gateway.maxConnectionAgeSeconds -}}
{{- with include "tandem.modelName" . -}}{{- $_ := set $gateway "model_name" . -}}{{- end -}}
{{- if .Values.gateway.tls.enabled -}}
{{- $_ := set $gateway "tls_cert_file" "/tandem/secrets/tls/tls.crt" -}}
{{- $_ := set $gateway "tls_key_file" "/tandem/secrets/tls/tls.key" -}}
{{- $_ := set $gateway "health_port" .Values.gateway.healthPort -}}
{{- end -}}
{{- $_ := set $config "gateway" (mergeOverwrite (dict "surge" false) (default dict $config.gateway) $gateway) -}}
{{- if .Values.innerTls.enabled -}}
{{- $inner := "/tandem/secrets/inner-tls" -}}
{{- $_ := set $config "inner_tls" (dict "cert_file" (printf "%s/tls.crt" $inner) "key_file" (printf "%s/tls.key" $inner) "ca_file" (printf "%s/ca.crt" $inner)) -}}
{{- end -}}
{{- if (include "tandem.redis" . | fromYaml).authority -}}
{{- $_ := set $config "store" (set (default dict $config.store) "redis_ca_file" "/tandem/secrets/redis-ca/ca.crt") -}}
{{- end -}}
{{- $_ := set $config "auth" (include "tandem.authConfig" . | fromYaml) -}}
{{- if (default dict $config.store).nvme_gb -}}{{- $_ := set $config.store "nvme_path" "/tandem/nvme" -}}{{- end -}}
{{- $pools := list -}}
{{- range $name, $pool := include "tandem.pools" . | fromYaml -}}
{{- $asked := dict "name" $name "resources" (dict (include "tandem.poolResource" $name) 0.001) -}}
{{- $pools = append $pools (merge $asked (omit $pool.config "replicas")) -}}
{{- end -}}
{{- $own := merge (dict "app" .Values.app "pools" $pools) (include "tandem.modelConfig" . | fromYaml) -}}
{{- merge $own $config | toYaml -}}
{{- end -}}

{{/* Refuses values that publish a port to those who should not reach it. A port counts as published where a Service
of it is a LoadBalancer or a NodePort, or where an Ingress or a route leads to it. */}}
{{- define "tandem.checkPublished" -}}
{{- $gateway := .Values.gateway -}}
{{- $mayBeOpen := or (eq .Values.auth.mode "required") .Values.auth.publishUnauthenticated -}}
{{- $twice := "set auth.mode required, or, where everybody who reaches the port may use it, auth.publishUnauthenticated: true" -}}
{{- $ways := include "tandem.publishedWays" . -}}
{{- if and $ways (not $mayBeOpen) -}}
{{- fail (printf "%s: publishes inference without authentication (auth.mode none): %s" $ways $twice) -}}
{{- end -}}
{{- range $name := list "ingress" "grpcRoute" "httpIngress" "httpRoute" -}}
{{- $way := get $gateway $name -}}
{{- if $way.enabled -}}
{{- if not $gateway.service.enabled -}}
{{- fail (printf "gateway.%s.enabled: needs gateway.service.enabled: requests go through that Service" $name) -}}
{{- end -}}
{{- if and (hasPrefix "http" $name) (not $gateway.http) -}}
{{- fail (printf "gateway.%s.enabled: needs gateway.http: without it the gateways answer gRPC alone" $name) -}}
{{- end -}}
{{- if and (hasKey $way "host") (not $way.host) -}}
{{- fail (printf "gateway.%s.host: must be given with gateway.%s.enabled" $name $name) -}}
{{- end -}}
{{- if and (hasKey $way "parentRefs") (not $way.parentRefs) -}}
{{- fail (printf "gateway.%s.parentRefs: must be given with gateway.%s.enabled: the Gateways that route" $name $name) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- $admin := $gateway.adminService -}}
{{- if and $admin.enabled (ne $admin.type "ClusterIP") -}}
{{- $way := printf "gateway.adminService.type: %s" $admin.type -}}
{{- if not $admin.publish -}}
{{- fail (printf "%s: publishes the administration of the cluster and the console: leave it ClusterIP and use kubectl port-forward, or set gateway.adminService.publish: true" $way) -}}
{{- end -}}
{{- if not $mayBeOpen -}}
{{- fail (printf "%s: publishes the administration without authentication (auth.mode none): %s" $way $twice) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* The values that publish gRPC or HTTP for clients; nothing where it stays inside the cluster. */}}
{{- define "tandem.publishedWays" -}}
{{- $gateway := .Values.gateway -}}
{{- $ways := list -}}
{{- if and $gateway.service.enabled (ne $gateway.service.type "ClusterIP") -}}
{{- $ways = append $ways (printf "gateway.service.type: %s" $gateway.service.type) -}}
{{- end -}}
{{- range $name := list "ingress" "grpcRoute" "httpIngress" "httpRoute" -}}
{{- if (get $gateway $name).enabled -}}{{- $ways = append $ways (printf "gateway.%s.enabled" $name) -}}{{- end -}}
{{- end -}}
{{- join ", " $ways -}}
{{- end -}}

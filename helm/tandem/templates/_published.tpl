{{/* Refuses values that publish a port to those who should not reach it. A port counts as published where a Service
of it is a LoadBalancer or a NodePort, or where an Ingress or a route leads to it. */}}
{{- define "tandem.checkPublished" -}}
{{- $gateway := .Values.gateway -}}
{{- $mayBeOpen := or (eq .Values.auth.mode "required") .Values.auth.publishUnauthenticated -}}
{{- $twice := "set auth.mode required, or, where everybody who reaches the port may use it, auth.publishUnauthenticated: true" -}}
{{- $ways := include "tandem.publishedWays" . -}}
{{- if and $ways (not $mayBeOpen) -}}
{{- fail (printf "%s: publishes gRPC without authentication (auth.mode none): %s" $ways $twice) -}}
{{- end -}}
{{- range $name := list "ingress" "grpcRoute" -}}
{{- if and (get $gateway $name).enabled (not $gateway.service.enabled) -}}
{{- fail (printf "gateway.%s.enabled: needs gateway.service.enabled: requests go through that Service" $name) -}}
{{- end -}}
{{- end -}}
{{- if and $gateway.ingress.enabled (not $gateway.ingress.host) -}}
{{- fail "gateway.ingress.host: must be given with gateway.ingress.enabled" -}}
{{- end -}}
{{- if and $gateway.grpcRoute.enabled (not $gateway.grpcRoute.parentRefs) -}}
{{- fail "gateway.grpcRoute.parentRefs: must be given with gateway.grpcRoute.enabled: the Gateways that route" -}}
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

{{/* The values that publish gRPC for clients; nothing where it stays inside the cluster. */}}
{{- define "tandem.publishedWays" -}}
{{- $gateway := .Values.gateway -}}
{{- $ways := list -}}
{{- if and $gateway.service.enabled (ne $gateway.service.type "ClusterIP") -}}
{{- $ways = append $ways (printf "gateway.service.type: %s" $gateway.service.type) -}}
{{- end -}}
{{- if $gateway.ingress.enabled -}}{{- $ways = append $ways "gateway.ingress.enabled" -}}{{- end -}}
{{- if $gateway.grpcRoute.enabled -}}{{- $ways = append $ways "gateway.grpcRoute.enabled" -}}{{- end -}}
{{- join ", " $ways -}}
{{- end -}}

{{/* Identity and encryption: what is mounted where, and what the cluster's file says of it. API keys, public keys, the
clients' authority and the roots of block keys are mounted in gateways alone. */}}

{{/* The volumes of the gateways: name, kind, object, key and file, for each that is used. As YAML. */}}
{{- define "tandem.authFiles" -}}
{{- $auth := .Values.auth -}}
{{- $name := include "tandem.fullname" . -}}
{{- $files := list (dict "name" "key-root" "kind" "secret" "object" (default (printf "%s-key-root" $name) $auth.keyRoot.existingSecret) "key" $auth.keyRoot.key "file" "roots") -}}
{{- if eq $auth.mode "required" -}}
{{- if $auth.apiKeys.enabled -}}
{{- $object := default (printf "%s-api-keys" $name) $auth.apiKeys.existingSecret -}}
{{- $files = append $files (dict "name" "api-keys" "kind" "secret" "object" $object "key" $auth.apiKeys.key "file" "keys.yaml") -}}
{{- end -}}
{{- $given := list -}}
{{- range list "keys" "existingConfigMap" "existingSecret" -}}
{{- if get $auth.jwt . -}}{{- $given = append $given . -}}{{- end -}}
{{- end -}}
{{- if gt (len $given) 1 -}}
{{- fail (printf "auth.jwt: %s exclude each other" (join " and " $given)) -}}
{{- end -}}
{{- $isConfigured := hasKey (default dict .Values.config.auth) "jwt" -}}
{{- if and $given (not $isConfigured) -}}
{{- fail "config.auth.jwt: must be given with auth.jwt: issuer and audience of the tokens" -}}
{{- end -}}
{{- if and $isConfigured (not $given) -}}
{{- fail "auth.jwt: keys, existingConfigMap or existingSecret must be given with config.auth.jwt: the issuer's public keys" -}}
{{- end -}}
{{- if $given -}}
{{- $kind := ternary "secret" "configMap" (not (empty $auth.jwt.existingSecret)) -}}
{{- $object := coalesce $auth.jwt.existingSecret $auth.jwt.existingConfigMap (printf "%s-jwks" $name) -}}
{{- $files = append $files (dict "name" "jwt-keys" "kind" $kind "object" $object "key" $auth.jwt.key "file" "keys") -}}
{{- end -}}
{{- $authority := $auth.certificates.existingSecret -}}
{{- if ne (hasKey (default dict .Values.config.auth) "certificates") (not (empty $authority)) -}}
{{- fail "auth.certificates.existingSecret and config.auth.certificates.identities: one needs the other: who signs client certificates, and who has which name" -}}
{{- end -}}
{{- if $authority -}}
{{- if not .Values.gateway.tls.enabled -}}
{{- fail "auth.certificates.existingSecret: needs gateway.tls.enabled: clients show their certificates in TLS" -}}
{{- end -}}
{{- $files = append $files (dict "name" "client-ca" "kind" "secret" "object" $authority "key" $auth.certificates.key "file" "ca.crt") -}}
{{- end -}}
{{- if not (or $auth.apiKeys.enabled $given $authority) -}}
{{- fail "auth.mode required: nobody could be let in: set auth.apiKeys.enabled, auth.jwt or auth.certificates" -}}
{{- end -}}
{{- end -}}
{{- $files | toYaml -}}
{{- end -}}

{{/* The section `auth` of the cluster's file. */}}
{{- define "tandem.authConfig" -}}
{{- $auth := deepCopy (default dict .Values.config.auth) -}}
{{- $_ := set $auth "mode" .Values.auth.mode -}}
{{- if eq .Values.auth.mode "none" -}}
{{- /* Pods listen on their own addresses; who reaches them is for the policies to say. */ -}}
{{- $auth = set (omit $auth "jwt" "certificates") "insecure" true -}}
{{- end -}}
{{- range include "tandem.authFiles" . | fromYamlArray -}}
{{- $path := printf "/tandem/secrets/%s/%s" .name .file -}}
{{- if eq .name "key-root" -}}{{- $_ := set $auth "key_root_file" $path -}}
{{- else if eq .name "api-keys" -}}{{- $_ := set $auth "keys_file" $path -}}
{{- else if eq .name "jwt-keys" -}}{{- $_ := set $auth.jwt "keys_file" $path -}}
{{- else -}}{{- $_ := set $auth.certificates "ca_file" $path -}}
{{- end -}}
{{- end -}}
{{- $auth | toYaml -}}
{{- end -}}

{{/* Files of other Ray pods too: the authority of Redis in all, the certificate of the connections inside in those that
open some. Call with (list $ part); the result is as of tandem.authFiles. */}}
{{- define "tandem.sharedFiles" -}}
{{- $root := index . 0 -}}{{- $part := index . 1 -}}
{{- $files := list -}}
{{- if and $root.Values.innerTls.enabled (ne $part "head") -}}
{{- $secret := default (printf "%s-inner" (include "tandem.fullname" $root)) $root.Values.innerTls.existingSecret -}}
{{- $files = append $files (dict "name" "inner-tls" "kind" "secret" "object" $secret "key" "") -}}
{{- end -}}
{{- with (include "tandem.redis" $root | fromYaml).authority -}}
{{- $files = append $files (dict "name" "redis-ca" "kind" "secret" "object" .secret "key" .key "file" "ca.crt") -}}
{{- end -}}
{{- $token := $root.Values.model.download.tokenSecret -}}
{{- if and (eq $root.Values.model.source "nodes") $token.name -}}
{{- $files = append $files (dict "name" "hub-token" "kind" "secret" "object" $token.name "key" $token.key "file" "token") -}}
{{- end -}}
{{- $files | toYaml -}}
{{- end -}}

{{/* Volumes and mounts of files that are read again when they change: whole folders, since what is mounted as a
single file never changes. Call with a list of dicts as of tandem.authFiles; without a key, all keys are files. */}}
{{- define "tandem.fileVolumes" -}}
{{- range . }}
- name: {{ .name }}
  {{- if eq .kind "secret" }}
  secret:
    secretName: {{ .object }}
    defaultMode: 0440
  {{- else }}
  configMap:
    name: {{ .object }}
  {{- end }}
    {{- if .key }}
    items:
      - key: {{ .key }}
        path: {{ .file }}
    {{- end }}
{{- end }}
{{- end -}}


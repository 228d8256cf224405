{{- define "k3svc.name" -}}
{{- if contains "k3svc" .Release.Name }}{{ .Release.Name }}{{ else }}{{ .Release.Name }}-k3svc{{ end }}
{{- end }}

{{- /* Labels that select the pods of a role: (dict "root" $ "role" "decode"). */}}
{{- define "k3svc.selector" -}}
app.kubernetes.io/name: k3svc
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .role }}
{{- end }}

{{- define "k3svc.labels" -}}
{{ include "k3svc.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ .root.Chart.Name }}-{{ .root.Chart.Version }}
{{- end }}

{{- define "k3svc.image" -}}
{{- $own := .own | default dict }}
{{- $common := .root.Values.image }}
{{- $own.repository | default $common.repository }}:{{ $own.tag | default $common.tag | default .root.Chart.AppVersion }}
{{- end }}

{{- define "k3svc.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: { drop: [ALL] }
{{- end }}

{{- define "k3svc.roles" -}}
prefill decode{{ if .Values.draft.enabled }} draft{{ end }}
{{- end }}

{{- /* A number as TOML writes it: values of Helm are floats, and the services tell 1024 from 1024.0. */}}
{{- define "k3svc.tomlValue" -}}
{{- if and (kindIs "float64" .) (eq (floor .) .) }}{{ printf "%.0f" . }}
{{- else if kindIs "float64" . }}{{ . }}
{{- else }}{{ toRawJson . }}{{ end }}
{{- end }}

{{- /* What the chart itself sets for a role. */}}
{{- define "k3svc.ownConfig" -}}
{{- $values := .root.Values }}
{{- $name := include "k3svc.name" .root }}
model: { path: {{ printf "/models/%s" $values.model.path | quote }} }
server: { host: 0.0.0.0, port: 50051 {{- if not (or $values.tls.enabled $values.auth.enabled) }}, insecure: true{{ end }} }
metrics: { host: 0.0.0.0, port: {{ $values.metrics.port }} }
# Pods share no memory.
transfer: { transport: grpc {{- if eq .role "prefill" }}, state_port: 50052{{ end }} }
{{- if $values.tls.enabled }}
tls:
  certificate: /etc/k3svc/tls/tls.crt
  key: /etc/k3svc/tls/tls.key
  ca: /etc/k3svc/tls/ca.crt
  {{- if $values.tls.mutual }}
  client_ca: /etc/k3svc/tls/ca.crt
  {{- end }}
{{- end }}
{{- if $values.auth.enabled }}
auth: { keys: /etc/k3svc/auth/keys.toml {{- if ne .role "draft" }}, token: /etc/k3svc/auth/token{{ end }} }
{{- end }}
{{- if eq .role "decode" }}
decode: { prefill: ["dns:///{{ $name }}-prefill:50051"] }
{{- end }}
{{- if and $values.gateway.enabled (ne .role "draft") }}
gateway: { enabled: true }
{{- end }}
{{- if $values.draft.enabled }}
draft:
  path: {{ printf "/models/%s" $values.model.draftPath | quote }}
  shm: false
  {{- if ne .role "draft" }}
  endpoint: {{ $name }}-draft:50051
  {{- end }}
{{- end }}
{{- end }}

{{- /* The configuration of a role in TOML. */}}
{{- define "k3svc.toml" -}}
{{- $own := include "k3svc.ownConfig" . | fromYaml }}
{{- $role := index .root.Values .role }}
{{- $merged := mergeOverwrite $own (deepCopy .root.Values.config) (deepCopy $role.config) }}
{{- range $section, $keys := $merged }}
[{{ $section }}]
{{- range $key, $value := $keys }}
{{ $key }} = {{ include "k3svc.tomlValue" $value }}
{{- end }}
{{ end }}
{{- end }}

{{- /* How long a pod gets to end: the wait before SIGTERM, the drain, and some time to stop. */}}
{{- define "k3svc.gracePeriod" -}}
{{- $role := index .root.Values .role }}
{{- $server := mergeOverwrite (dict "drain_s" 30.0) (deepCopy (.root.Values.config.server | default dict)) (deepCopy ($role.config.server | default dict)) }}
{{- add .root.Values.preStopSeconds (ceil $server.drain_s) 15 }}
{{- end }}

{{- /* A probe of health: the kubelet speaks gRPC without TLS only. */}}
{{- define "k3svc.probe" -}}
{{- if .root.Values.tls.enabled }}
exec: { command: [k3svc, health, "localhost:50051", --service, {{ .service | quote }}] }
timeoutSeconds: 10
{{- else }}
grpc: { port: 50051, service: {{ .service | quote }} }
timeoutSeconds: 5
{{- end }}
{{- end }}

{{- define "k3svc.tlsEnvironment" -}}
- { name: K3SVC_TLS_CA, value: /etc/k3svc/tls/ca.crt }
- { name: K3SVC_TLS_CERT, value: /etc/k3svc/tls/tls.crt }
- { name: K3SVC_TLS_KEY, value: /etc/k3svc/tls/tls.key }
{{- end }}

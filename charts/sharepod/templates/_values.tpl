{{/* Image of a part. Arguments: the root context and the part, operator or agent. */}}
{{- define "sharepod.image" -}}
{{- $root := index . 0 }}{{ $part := index . 1 }}
{{- $digest := (index $root.Values $part).digest }}
{{- $name := printf "%s/%s" $root.Values.image.registry $part }}
{{- if $digest }}{{ printf "%s@%s" $name $digest }}
{{- else }}{{ printf "%s:%s" $name ($root.Values.image.tag | default $root.Chart.AppVersion) }}
{{- end }}
{{- end }}

{{/* Settings file of the operator. Helm drops keys with the value null, so the RuntimeClass has a value of its own. */}}
{{- define "sharepod.operatorSettings" -}}
runtime_class: {{ .Values.runtimeClass | default nil | toJson }}
{{ with .Values.operator.settings }}{{ toYaml . }}{{ end }}
{{- end }}

{{/* Settings file of the agents. */}}
{{- define "sharepod.agentSettings" -}}
{{- with .Values.agent.settings }}{{ toYaml . }}{{ end }}
{{- end }}

{{/* Refuse values that give no working installation. */}}
{{- define "sharepod.checks" -}}
{{- if and (ne .Release.Namespace "sharepod-system") (not .Values.namespace.create) }}
{{- fail "SharePod runs in the namespace sharepod-system, because policies name its ServiceAccounts: add --namespace sharepod-system --create-namespace, or set namespace.create=true" }}
{{- end }}
{{- if and (eq .Release.Namespace "sharepod-system") .Values.namespace.create }}
{{- fail "namespace.create: the release is recorded in sharepod-system, so Helm creates that namespace first: use --create-namespace in place of namespace.create" }}
{{- end }}
{{- if and (has .Values.plainPods (list "Policy" "Webhook")) (not .Values.claims.enabled) }}
{{- fail (printf "plainPods: %s gives plain Pods their shares by claims: set claims.enabled=true, or plainPods=Volume on a cluster without claims" .Values.plainPods) }}
{{- end }}
{{- if and .Values.claims.selfTest (not .Values.claims.enabled) }}
{{- fail "claims.selfTest tests the nodes by a claim: set claims.enabled=true, too" }}
{{- end }}
{{- end }}

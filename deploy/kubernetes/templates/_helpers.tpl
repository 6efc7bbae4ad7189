{{- define "warpfit.name" -}}
{{- if contains .Chart.Name .Release.Name -}}
{{- .Release.Name | trunc 53 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name .Chart.Name | trunc 53 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "warpfit.selector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "warpfit.labels" -}}
{{ include "warpfit.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end -}}

{{- /* The variables of the server as YAML: those of the chart, and the settings, which win. A setting
may be written "some-name" or some_name; the second form comes later and wins over a default. */}}
{{- define "warpfit.environment" -}}
{{- $all := dict "WARPFIT_HOST" "0.0.0.0" -}}
{{- /* Health checks and metrics come from where calls come from. */ -}}
{{- $host := get .Values.settings "host" | default "0.0.0.0" -}}
{{- if and (contains ":" $host) (not (contains "[" $host)) }}{{ $host = printf "[%s]" $host }}{{ end -}}
{{- $_ := set $all "WARPFIT_PORT" (toString .Values.ports.grpc) -}}
{{- $_ := set $all "WARPFIT_HEALTH_PORT" (printf "%s:%v" $host .Values.ports.health) -}}
{{- $_ := set $all "WARPFIT_METRICS_PORT" (printf "%s:%v" $host .Values.ports.metrics) -}}
{{- $_ := set $all "WARPFIT_CACHE_DIR" "/var/cache/warpfit/code" -}}
{{- $_ := set $all "WARPFIT_DEVICES" (ternary "all" "cpu" .Values.gpu.enabled) -}}
{{- $_ := set $all "WARPFIT_LOG_FORMAT" "json" -}}
{{- if .Values.networkPolicy.enabled -}}
{{- /* The network policy says who may read them. */ -}}
{{- $_ := set $all "WARPFIT_EXPOSE_TENANTS" "true" -}}
{{- end -}}
{{- if .Values.tls.secretName -}}
{{- $_ := set $all "WARPFIT_TLS_CERT" "/etc/warpfit/tls/tls.crt" -}}
{{- $_ := set $all "WARPFIT_TLS_KEY" "/etc/warpfit/tls/tls.key" -}}
{{- else if .Values.insecure.plainText -}}
{{- $_ := set $all "WARPFIT_INSECURE" "true" -}}
{{- end -}}
{{- if .Values.tls.clientCaSecretName -}}
{{- $_ := set $all "WARPFIT_TLS_CLIENT_CA" "/etc/warpfit/client-ca/ca.crt" -}}
{{- end -}}
{{- if .Values.tokens.secretName -}}
{{- $_ := set $all "WARPFIT_TOKEN_FILE" "/etc/warpfit/tokens/tokens" -}}
{{- end -}}
{{- range $name, $value := .Values.settings -}}
{{- /* Helm reads all numbers as floating-point ones, which would be written 1.2e+08. */ -}}
{{- $text := toString $value -}}
{{- if kindIs "float64" $value }}{{ $text = toJson $value }}{{ end -}}
{{- $_ := set $all (printf "WARPFIT_%s" ($name | replace "-" "_" | upper)) $text -}}
{{- end -}}
{{- toYaml $all -}}
{{- end -}}

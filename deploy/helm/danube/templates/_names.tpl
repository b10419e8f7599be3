{{- define "danube.name" -}}
{{- if contains .Chart.Name .Release.Name -}}{{ .Release.Name | trunc 50 | trimSuffix "-" }}
{{- else -}}{{ printf "%s-%s" .Release.Name .Chart.Name | trunc 50 | trimSuffix "-" }}{{- end -}}
{{- end -}}

{{- define "danube.selector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "danube.labels" -}}
{{ include "danube.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end -}}

{{- /* Raft addresses of the founders: pods 0 to initialMembers - 1. */ -}}
{{- define "danube.founders" -}}
{{- $name := include "danube.name" . -}}
{{- $founders := list -}}
{{- range $number := until (int .Values.initialMembers) -}}
{{- $founders = append $founders (printf "%s-%d.%s-members.%s.svc:%d" $name $number $name $.Release.Namespace (int $.Values.ports.raft)) -}}
{{- end -}}
{{- join "," $founders -}}
{{- end -}}

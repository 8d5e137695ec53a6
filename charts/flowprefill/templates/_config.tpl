{{/* The file that the operator reads. */}}
{{- define "flowprefill.config" -}}
namespaces: {{ toJson .Values.namespaces }}
images:
  {{- range $use, $image := .Values.serving.images }}
  {{ $use }}: {{ include "flowprefill.image" (dict "root" $ "image" $image) | quote }}
  {{- end }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
{{- $secrets := list }}
{{- range .Values.imagePullSecrets }}{{- $secrets = append $secrets .name }}{{- end }}
imagePullSecrets: {{ toJson $secrets }}
networkPolicy: {{ .Values.serving.networkPolicy }}
monitoringFrom: {{ toJson .Values.monitoring.from }}
leaderElection:
  enabled: {{ .Values.leaderElection.enabled }}
  leaseName: {{ include "flowprefill.operator" . }}
  leaseSeconds: {{ int .Values.leaderElection.leaseSeconds }}
resyncSeconds: {{ int .Values.resyncSeconds }}
logFormat: {{ .Values.logFormat }}
logLevel: {{ .Values.logLevel }}
port: 8080
{{- end -}}

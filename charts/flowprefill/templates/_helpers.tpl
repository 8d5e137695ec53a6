{{/* Fits a name into 63 characters and DNS-1035, with a hash of the whole behind it when it had to change.
     Takes a dict: name, room (most characters). */}}
{{- define "flowprefill.fit" -}}
{{- $name := .name | replace "." "-" -}}
{{- if not (regexMatch "^[a-z]" $name) -}}{{- $name = printf "r%s" $name -}}{{- end -}}
{{- if and (eq $name .name) (le (len $name) (int .room)) -}}
{{- $name -}}
{{- else -}}
{{- printf "%s-%s" ($name | trunc (int (sub .room 9)) | trimSuffix "-") (sha256sum .name | trunc 8) -}}
{{- end -}}
{{- end -}}

{{/* The chart's name, or what replaces it. */}}
{{- define "flowprefill.name" -}}
{{- .Values.nameOverride | default .Chart.Name -}}
{{- end -}}

{{/* Name of all objects before their suffix; room is left for the suffixes. */}}
{{- define "flowprefill.fullname" -}}
{{- $name := include "flowprefill.name" . -}}
{{- $whole := .Values.fullnameOverride -}}
{{- if not $whole -}}
{{- $whole = ternary .Release.Name (printf "%s-%s" .Release.Name $name) (contains $name .Release.Name) -}}
{{- end -}}
{{- include "flowprefill.fit" (dict "name" $whole "room" 44) -}}
{{- end -}}

{{/* Name of the operator's namespaced objects. */}}
{{- define "flowprefill.operator" -}}
{{- include "flowprefill.fullname" . }}-operator
{{- end -}}

{{/* Name of the operator's cluster roles. A release that serves listed namespaces may have a twin in another namespace;
     of a release that serves all there is one. */}}
{{- define "flowprefill.clusterName" -}}
{{- if .Values.namespaces -}}
{{- include "flowprefill.fit" (dict "name" (printf "%s-%s" (include "flowprefill.operator" .) .Release.Namespace) "room" 63) -}}
{{- else -}}
{{- include "flowprefill.operator" . -}}
{{- end -}}
{{- end -}}

{{- define "flowprefill.serviceAccountName" -}}
{{- .Values.serviceAccount.name | default (include "flowprefill.operator" .) -}}
{{- end -}}

{{/* What the Deployment, the Service and the policies select the operator's pods by; never changes. */}}
{{- define "flowprefill.selectorLabels" -}}
app.kubernetes.io/name: {{ include "flowprefill.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: operator
{{- end -}}

{{/* Labels of an object. Takes a dict: root, component (default operator). */}}
{{- define "flowprefill.labels" -}}
{{- $own := dict
  "app.kubernetes.io/name" (include "flowprefill.name" .root)
  "app.kubernetes.io/instance" .root.Release.Name
  "app.kubernetes.io/component" (.component | default "operator")
  "app.kubernetes.io/part-of" "flowprefill"
  "app.kubernetes.io/version" (.root.Chart.AppVersion | replace "+" "_")
  "app.kubernetes.io/managed-by" .root.Release.Service
  "helm.sh/chart" (printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" | trunc 63 | trimSuffix "-")
-}}
{{- merge $own .root.Values.commonLabels | toYaml -}}
{{- end -}}

{{/* An image: registry/repository:tag or registry/repository@digest. Takes a dict: root, image. */}}
{{- define "flowprefill.image" -}}
{{- $registry := .image.registry | default .root.Values.image.registry | trimSuffix "/" -}}
{{- $name := .image.repository -}}
{{- if $registry -}}{{- $name = printf "%s/%s" $registry $name -}}{{- end -}}
{{- if .image.digest -}}
{{- printf "%s@%s" $name .image.digest -}}
{{- else -}}
{{- printf "%s:%s" $name (.image.tag | default .root.Values.image.tag | default .root.Chart.AppVersion) -}}
{{- end -}}
{{- end -}}

{{/* Whether the API server has a kind of prometheus-operator; "true" or empty. Takes a dict: root, kind. */}}
{{- define "flowprefill.hasMonitor" -}}
{{- if .root.Capabilities.APIVersions.Has (printf "monitoring.coreos.com/v1/%s" .kind) -}}true{{- end -}}
{{- end -}}

{{/* What values.schema.json cannot say. Each message names the values, what was seen and what is accepted. */}}
{{- define "flowprefill.validate" -}}
{{- $v := .Values -}}
{{- if and (gt (int $v.replicaCount) 1) (not $v.leaderElection.enabled) -}}
{{- fail (printf "replicaCount is %d and leaderElection.enabled is false: two operators would both work; enable leader election or use replicaCount 1" (int $v.replicaCount)) -}}
{{- end -}}
{{- if and (eq ($v.strategy.type | default "") "RollingUpdate") (not $v.leaderElection.enabled) -}}
{{- fail "strategy.type is RollingUpdate and leaderElection.enabled is false: old and new operator would both work; enable leader election or use strategy.type Recreate" -}}
{{- end -}}
{{- if and (eq ($v.strategy.type | default "") "Recreate") $v.strategy.rollingUpdate -}}
{{- fail "strategy.type is Recreate, which takes no strategy.rollingUpdate; leave it out" -}}
{{- end -}}
{{- if and (not $v.serviceAccount.create) (not $v.serviceAccount.name) -}}
{{- fail "serviceAccount.create is false and serviceAccount.name is empty: the operator's rights would go to the namespace's default account; name an account" -}}
{{- end -}}
{{- if and $v.monitoring.podMonitor.enabled $v.monitoring.serviceMonitor.enabled -}}
{{- fail "monitoring.podMonitor.enabled and monitoring.serviceMonitor.enabled are both true: each operator would be scraped twice; set one of them to false" -}}
{{- end -}}
{{- range $v.extraEnv -}}
{{- if has .name (list "POD_NAME" "POD_NAMESPACE") -}}
{{- fail (printf "extraEnv has %s, which the chart sets; leave it out" .name) -}}
{{- end -}}
{{- end -}}
{{- $selector := include "flowprefill.selectorLabels" . | fromYaml -}}
{{- range $values := list "podLabels" "commonLabels" -}}
{{- range $name, $value := get $v $values -}}
{{- if hasKey $selector $name -}}
{{- fail (printf "%s has %s, by which the operator's pods are selected; use another label" $values $name) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if $v.rbac.create -}}{{- include "flowprefill.validateAlone" . -}}{{- end -}}
{{- end -}}

{{/* No other release may serve the same namespaces: both would write the same objects for ever. Their bindings tell.
     Without a cluster (helm template) there is nothing to look up and nothing is checked. */}}
{{- define "flowprefill.validateAlone" -}}
{{- $root := . -}}
{{- range (lookup "rbac.authorization.k8s.io/v1" "ClusterRoleBinding" "" "").items -}}
{{- $labels := .metadata.labels | default dict -}}
{{- if eq (get $labels "flowprefill.io/scope") "cluster" -}}
{{- include "flowprefill.validateOther" (dict "root" $root "binding" . "where" "every namespace") -}}
{{- end -}}
{{- end -}}
{{- $namespaces := .Values.namespaces | default (list "") -}}
{{- range $namespace := $namespaces -}}
{{- range (lookup "rbac.authorization.k8s.io/v1" "RoleBinding" $namespace "").items -}}
{{- $labels := .metadata.labels | default dict -}}
{{- if eq (get $labels "flowprefill.io/scope") "namespace" -}}
{{- include "flowprefill.validateOther" (dict "root" $root "binding" . "where" (printf "namespace %s" .metadata.namespace)) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Fails when a binding belongs to another release. Takes a dict: root, binding, where. */}}
{{- define "flowprefill.validateOther" -}}
{{- $annotations := .binding.metadata.annotations | default dict -}}
{{- $name := get $annotations "meta.helm.sh/release-name" -}}
{{- $namespace := get $annotations "meta.helm.sh/release-namespace" -}}
{{- if not (and (eq $name .root.Release.Name) (eq $namespace .root.Release.Namespace)) -}}
{{- fail (printf "release %q in namespace %q already serves %s; uninstall it, or give the two releases different namespaces" $name $namespace .where) -}}
{{- end -}}
{{- end -}}

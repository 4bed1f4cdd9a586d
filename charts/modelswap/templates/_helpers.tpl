{{- define "modelswap.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" }}
{{- end }}

{{- define "modelswap.fullname" -}}
{{- if .Values.fullnameOverride }}
{{- .Values.fullnameOverride | trunc 52 | trimSuffix "-" }}
{{- else }}
{{- $name := include "modelswap.name" . }}
{{- if contains $name .Release.Name }}
{{- .Release.Name | trunc 52 | trimSuffix "-" }}
{{- else }}
{{- printf "%s-%s" .Release.Name $name | trunc 52 | trimSuffix "-" }}
{{- end }}
{{- end }}
{{- end }}

{{/* What selectors may name: it must never change. */}}
{{- define "modelswap.selectorLabels" -}}
app.kubernetes.io/name: {{ include "modelswap.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: operator
{{- end }}

{{- define "modelswap.labels" -}}
{{ include "modelswap.selectorLabels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/part-of: modelswap
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" | trunc 63 | trimSuffix "-" }}
{{- end }}

{{- define "modelswap.serviceAccountName" -}}
{{- if .Values.serviceAccount.create }}
{{- default (include "modelswap.fullname" .) .Values.serviceAccount.name }}
{{- else }}
{{- required "serviceAccount.name is required when serviceAccount.create is false" .Values.serviceAccount.name }}
{{- end }}
{{- end }}

{{- define "modelswap.image" -}}
{{- with .Values.image }}
{{- if .digest }}
{{- printf "%s@%s" .repository .digest }}
{{- else }}
{{- printf "%s:%s" .repository (default $.Chart.AppVersion .tag) }}
{{- end }}
{{- end }}
{{- end }}

{{/* What the operator may do where it serves ModelVersions; one list for the ClusterRole and the Roles. */}}
{{- define "modelswap.rules" -}}
- apiGroups: [modelswap.dev]
  resources: [modelversions, loraadapters]
  verbs: [get, list, watch]
- apiGroups: [modelswap.dev]
  resources: [modelversions/status, loraadapters/status]
  verbs: [get, patch, update]
- apiGroups: [""]
  resources: [pods]
  verbs: [get, list, watch]
# Assignments, modelswap-SLOT. RBAC can restrict neither list nor create to names.
- apiGroups: [""]
  resources: [configmaps]
  verbs: [get, list, watch, create, patch, update]
{{- if .Values.rbac.adapterServices }}
# Of LoRAAdapters with spec.service. RBAC cannot restrict create to names; adapter-services-guard.yaml keeps it to these.
- apiGroups: [""]
  resources: [services]
  verbs: [get, list, create, patch, delete]
- apiGroups: [discovery.k8s.io]
  resources: [endpointslices]
  verbs: [get, list, create, patch, delete]
{{- end }}
- apiGroups: ["", events.k8s.io]
  resources: [events]
  verbs: [create, patch]
{{- end }}

{{- define "modelswap-engine.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" }}
{{- end }}

{{- define "modelswap-engine.fullname" -}}
{{- if .Values.fullnameOverride }}
{{- .Values.fullnameOverride | trunc 52 | trimSuffix "-" }}
{{- else }}
{{- $name := include "modelswap-engine.name" . }}
{{- if contains $name .Release.Name }}
{{- .Release.Name | trunc 52 | trimSuffix "-" }}
{{- else }}
{{- printf "%s-%s" .Release.Name $name | trunc 52 | trimSuffix "-" }}
{{- end }}
{{- end }}
{{- end }}

{{- define "modelswap-engine.slot" -}}
{{- default .Release.Name .Values.slot }}
{{- end }}

{{- define "modelswap-engine.servedModelName" -}}
{{- default (include "modelswap-engine.slot" .) .Values.servedModelName }}
{{- end }}

{{- define "modelswap-engine.modelPath" -}}
{{- required "model.path is required: the checkpoint that the pods start with, as a folder that the container sees, such as /models/smollm2-1.0, or as a URI below sources.allow" .Values.model.path }}
{{- end }}

{{/* What selectors may name: it must never change. */}}
{{- define "modelswap-engine.selectorLabels" -}}
app.kubernetes.io/name: {{ include "modelswap-engine.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: engine
{{- end }}

{{- define "modelswap-engine.labels" -}}
{{ include "modelswap-engine.selectorLabels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/part-of: modelswap
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" | trunc 63 | trimSuffix "-" }}
{{- end }}

{{- define "modelswap-engine.serviceAccountName" -}}
{{- if .Values.serviceAccount.create }}
{{- default (include "modelswap-engine.fullname" .) .Values.serviceAccount.name }}
{{- else }}
{{- required "serviceAccount.name is required when serviceAccount.create is false" .Values.serviceAccount.name }}
{{- end }}
{{- end }}

{{- define "modelswap-engine.image" -}}
{{- $own := ternary "modelswap/sidecar" "modelswap/engine" (not (empty (include "modelswap-engine.external" .))) }}
{{- with .Values.image }}
{{- $repository := default $own .repository }}
{{- if .digest }}
{{- printf "%s@%s" $repository .digest }}
{{- else }}
{{- printf "%s:%s" $repository (default $.Chart.AppVersion .tag) }}
{{- end }}
{{- end }}
{{- end }}

{{/* The source of the models volume, or nothing. */}}
{{- define "modelswap-engine.modelsVolume" -}}
{{- $given := list }}
{{- with .Values.models.hostPath }}
{{- if .path }}
{{- $given = append $given (dict "hostPath" (dict "path" .path "type" .type)) }}
{{- end }}
{{- end }}
{{- with .Values.models.persistentVolumeClaim.claimName }}
{{- $given = append $given (dict "persistentVolumeClaim" (dict "claimName" . "readOnly" true)) }}
{{- end }}
{{- with .Values.models.volume }}
{{- $given = append $given . }}
{{- end }}
{{- if gt (len $given) 1 }}
{{- fail "models: set at most one of hostPath.path, persistentVolumeClaim.claimName and volume" }}
{{- end }}
{{- range $given }}
{{- toYaml . }}
{{- end }}
{{- end }}

{{/* The name of the control port says whether it speaks TLS: the operator goes by it. */}}
{{- define "modelswap-engine.controlPort" -}}
{{- ternary "modelswap-tls" "modelswap" .Values.controlTls.enabled }}
{{- end }}

{{- define "modelswap-engine.controlScheme" -}}
{{- ternary "HTTPS" "HTTP" .Values.controlTls.enabled }}
{{- end }}

{{- define "modelswap-engine.controlServerName" -}}
{{- default (printf "modelswap-control.%s.svc" .Release.Namespace) .Values.controlTls.serverName }}
{{- end }}

{{- define "modelswap-engine.controlSecret" -}}
{{- with .Values.controlTls }}
{{- if and .secretName .certManager.issuerRef.name }}
{{- fail "controlTls: set secretName (a Secret that exists) or certManager.issuerRef.name (one is made), not both" }}
{{- else if .secretName }}
{{- .secretName }}
{{- else if .certManager.issuerRef.name }}
{{- printf "%s-control-tls" (include "modelswap-engine.fullname" $) }}
{{- else }}
{{- fail "controlTls.enabled needs secretName (a Secret that exists) or certManager.issuerRef.name (one is made)" }}
{{- end }}
{{- end }}
{{- end }}

{{- define "modelswap-engine.controlMount" -}}
{{- if .Values.controlTls.enabled }}
- name: control-tls
  mountPath: /etc/modelswap/tls
  readOnly: true
{{- end }}
{{- end }}

{{/* What every sidecar is told, whichever engine it drives. */}}
{{- define "modelswap-engine.commonArgs" -}}
{{- $roots := .Values.allowedRoots }}
{{- if and (not $roots) (include "modelswap-engine.modelsVolume" .) }}
{{- $roots = list .Values.models.mountPath }}
{{- end -}}
- --model={{ include "modelswap-engine.modelPath" . }}
- --served-model-name={{ include "modelswap-engine.servedModelName" . }}
{{- with .Values.model.version }}
- --version={{ . }}
{{- end }}
- --host=0.0.0.0
- --port=8000
- --control-port=8001
{{- if .Values.controlTls.enabled }}
- --control-tls-cert=/etc/modelswap/tls/tls.crt
- --control-tls-key=/etc/modelswap/tls/tls.key
{{- end }}
- --state-dir=/var/lib/modelswap
{{- range $roots }}
- --allow-root={{ . }}
{{- end }}
{{- range .Values.sources.allow }}
- --allow-source={{ . }}
{{- end }}
{{- if .Values.sources.allowPrivateRedirects }}
- --allow-private-redirects
{{- end }}
{{- range .Values.sources.claims }}
- --claim={{ . }}=/claims/{{ . }}
{{- end }}
{{- with .Values.sources.credentials }}
- --credentials-dir=/etc/modelswap/credentials
{{- range $item := . }}
{{- range .prefixes }}
- --source-credentials={{ $item.name }}={{ . }}
{{- end }}
{{- end }}
{{- end }}
{{- if .Values.sources.allow }}
- --store-dir=/var/lib/modelswap-store
- --store-size={{ required "sources.store.sizeLimit is required with sources.allow: what is fetched is kept there" .Values.sources.store.sizeLimit }}
{{- if (.Values.sources.store.hostPath).path }}
- --store-shared
{{- end }}
{{- end }}
{{- with .Values.verification }}
{{- if and .required (not (or .keys.configMap .keys.secret)) }}
{{- fail "verification.required needs verification.keys.configMap or verification.keys.secret: nobody could have signed anything" }}
{{- end }}
{{- if .required }}
- --require-signature
{{- end }}
{{- if or .keys.configMap .keys.secret }}
- --trusted-keys=/etc/modelswap/trusted-keys
{{- end }}
{{- end }}
{{- if include "modelswap-engine.peers" . }}
- --peers={{ include "modelswap-engine.peers" . }}:8001
- --peer-token-file=/etc/modelswap/peers/token
{{- if .Values.controlTls.enabled }}
- --peer-ca-file=/etc/modelswap/peers/ca.crt
- --peer-server-name={{ include "modelswap-engine.controlServerName" . }}
{{- end }}
- --peer-bytes-per-second={{ int64 .Values.sources.peers.bytesPerSecond }}
{{- end }}
- --assignment-dir=/etc/modelswap/assignment
- --auth=kubernetes
- --allowed-subject=system:serviceaccount:{{ .Values.operator.namespace }}:{{ .Values.operator.serviceAccount }}
{{- end }}

{{/* The engine's own container reads what was fetched by the same path as the sidecar. */}}
{{- define "modelswap-engine.storeMount" -}}
{{- if .Values.sources.allow }}
- name: store
  mountPath: /var/lib/modelswap-store
{{- end }}
{{- end }}

{{/* The headless Service that leads to all pods of the slot, or nothing where they share nothing. */}}
{{- define "modelswap-engine.peers" -}}
{{- if and .Values.sources.allow .Values.sources.peers.enabled }}
{{- printf "%s-peers" (include "modelswap-engine.fullname" .) }}
{{- end }}
{{- end }}

{{- define "modelswap-engine.peersMount" -}}
{{- if include "modelswap-engine.peers" . }}
- name: peers
  mountPath: /etc/modelswap/peers
  readOnly: true
{{- end }}
{{- end }}

{{/* What pods of the slot show each other: their own token, for an audience that is nobody else's. */}}
{{- define "modelswap-engine.peersVolume" -}}
{{- if include "modelswap-engine.peers" . }}
- name: peers
  projected:
    defaultMode: 0440
    sources:
      - serviceAccountToken:
          path: token
          audience: modelswap-peers.{{ include "modelswap-engine.slot" . }}.{{ .Release.Namespace }}
          expirationSeconds: 3600
      {{- if .Values.controlTls.enabled }}
      # Without it no peer is believed, and all comes from the source.
      - secret:
          name: {{ include "modelswap-engine.controlSecret" . }}
          optional: true
          items:
            - key: ca.crt
              path: ca.crt
      {{- end }}
{{- end }}
{{- end }}

{{- define "modelswap-engine.claimMounts" -}}
{{- range .Values.sources.claims }}
- name: {{ include "modelswap-engine.claimVolume" . }}
  mountPath: /claims/{{ . }}
  readOnly: true
{{- end }}
{{- end }}

{{- define "modelswap-engine.credentialMounts" -}}
{{- range .Values.sources.credentials }}
- name: credentials-{{ .name }}
  mountPath: /etc/modelswap/credentials/{{ .name }}
  readOnly: true
{{- end }}
{{- end }}

{{- define "modelswap-engine.trustedMount" -}}
{{- with .Values.verification.keys }}
{{- if or .configMap .secret }}
- name: trusted-keys
  mountPath: /etc/modelswap/trusted-keys
  readOnly: true
{{- end }}
{{- end }}
{{- end }}

{{/* The whole object: keys that are added or taken away are seen without a restart. */}}
{{- define "modelswap-engine.trustedVolume" -}}
{{- with .Values.verification.keys }}
{{- if and .configMap .secret }}
{{- fail "verification.keys: name a configMap or a secret, not both" }}
{{- end }}
{{- with .configMap }}
- name: trusted-keys
  configMap:
    name: {{ . }}
{{- end }}
{{- with .secret }}
- name: trusted-keys
  secret:
    secretName: {{ . }}
    defaultMode: 0440
{{- end }}
{{- end }}
{{- end }}

{{- define "modelswap-engine.claimVolume" -}}
{{- printf "claim-%s" (sha256sum . | trunc 12) }}
{{- end }}

{{- define "modelswap-engine.sourceVolumes" -}}
{{- with .Values.sources }}
{{- if and (.store.hostPath).path (not .allow) }}
{{- fail "sources.store.hostPath needs sources.allow: nothing is fetched without" }}
{{- end }}
{{- if .allow }}
- name: store
  {{- if (.store.hostPath).path }}
  hostPath:
    path: {{ .store.hostPath.path | quote }}
    type: Directory
  {{- else if .store.volume }}
  {{- toYaml .store.volume | nindent 2 }}
  {{- else }}
  emptyDir:
    sizeLimit: {{ .store.sizeLimit }}
  {{- end }}
{{- end }}
{{- range .claims }}
- name: {{ include "modelswap-engine.claimVolume" . }}
  persistentVolumeClaim:
    claimName: {{ . }}
    readOnly: true
{{- end }}
{{- range .credentials }}
# The whole Secret: keys that change are seen without a restart.
- name: credentials-{{ .name }}
  secret:
    secretName: {{ .secretName }}
    defaultMode: 0440
{{- end }}
{{- end }}
{{- end }}

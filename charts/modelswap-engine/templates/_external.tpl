{{/* Pods of kind vllm and sglang: the engine's own server in a container of its own, a sidecar before it. */}}

{{- define "modelswap-engine.external" -}}
{{- if ne .Values.engine.kind "embedded" }}true{{- end }}
{{- end }}

{{/* Bytes of a quantity such as 8Gi. */}}
{{- define "modelswap-engine.bytes" -}}
{{- $units := dict "" 1 "k" 1000 "M" 1000000 "G" 1000000000 "T" 1000000000000 "Ki" 1024 "Mi" 1048576 "Gi" 1073741824 "Ti" 1099511627776 }}
{{- $text := toString . }}
{{- $unit := regexFind "[A-Za-z]*$" $text }}
{{- $number := trimSuffix $unit $text }}
{{- if or (not (hasKey $units $unit)) (not (regexMatch "^[0-9]+$" $number)) }}
{{- fail (printf "%q: write a whole number with one of the units Ki, Mi, Gi, Ti, k, M, G, T" $text) }}
{{- end }}
{{- mul (int64 $number) (get $units $unit) }}
{{- end }}

{{- define "modelswap-engine.shm" -}}
{{- default "1Gi" .Values.shm.sizeLimit }}
{{- end }}

{{- define "modelswap-engine.engineImage" -}}
{{- with .Values.engine.image }}
{{- if not .repository }}
{{- fail (printf "engine.image.repository is required when engine.kind is %s: the image of the engine's own server" $.Values.engine.kind) }}
{{- end }}
{{- if not (or .digest .tag) }}
{{- fail "engine.image: set digest or tag; which version of an engine runs must not depend on the day" }}
{{- end }}
{{- if .digest }}
{{- printf "%s@%s" .repository .digest }}
{{- else }}
{{- printf "%s:%s" .repository .tag }}
{{- end }}
{{- end }}
{{- end }}

{{/* Refuses what an external engine would ignore. */}}
{{- define "modelswap-engine.checkExternal" -}}
{{- $kind := .Values.engine.kind }}
{{- if not .Values.engine.experimental }}
{{- fail (printf "engine.kind %s is experimental; read docs/backends.md for what is missing, and set engine.experimental to true to have it all the same" $kind) }}
{{- end }}
{{- if not .Values.engine.checkpoints.sizeLimit }}
{{- fail "engine.checkpoints.sizeLimit is required: three times the largest checkpoint (the one served, the one before, the one that is written)" }}
{{- end }}
{{- $own := list }}
{{- if ne .Values.device "auto" }}{{ $own = append $own "device" }}{{ end }}
{{- if .Values.kvCache.blocks }}{{ $own = append $own "kvCache.blocks" }}{{ end }}
{{- if .Values.kvCache.pageSize }}{{ $own = append $own "kvCache.pageSize" }}{{ end }}
{{- if .Values.maxBatchTokens }}{{ $own = append $own "maxBatchTokens" }}{{ end }}
{{- if ne (int .Values.tensorParallel) 1 }}{{ $own = append $own "tensorParallel" }}{{ end }}
{{- if ne (int .Values.dataParallel) 1 }}{{ $own = append $own "dataParallel" }}{{ end }}
{{- range $field, $value := pick .Values.trainer "serviceAccounts" "from" "peers" "exportRoots" "weightLoaders" }}
{{- if $value }}{{ $own = append $own (printf "trainer.%s" $field) }}{{ end }}
{{- end }}
{{- with $own }}
{{- fail (printf "%s: of the embedded engine only; the options of %s itself belong in engine.args" (join ", " .) $kind) }}
{{- end }}
{{- with .Values.resources.limits }}
{{- if and .memory (ge (int64 (include "modelswap-engine.bytes" (include "modelswap-engine.shm" $))) (int64 (include "modelswap-engine.bytes" .memory))) }}
{{- fail (printf "resources.limits.memory (%s) must be above shm.sizeLimit (%s): what lies in /dev/shm counts as the engine's memory" .memory (include "modelswap-engine.shm" $)) }}
{{- end }}
{{- end }}
{{- end }}

{{- define "modelswap-engine.restrictedContainer" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end }}

{{- define "modelswap-engine.httpProbe" -}}
httpGet:
  path: {{ .path }}
  port: {{ .port }}
  {{- if eq .scheme "HTTPS" }}
  scheme: HTTPS
  {{- end }}
periodSeconds: {{ .probe.periodSeconds }}
timeoutSeconds: {{ .probe.timeoutSeconds }}
failureThreshold: {{ .probe.failureThreshold }}
{{- end }}

{{- define "modelswap-engine.externalInitContainers" -}}
{{- $port := include "modelswap-engine.controlPort" . }}
{{- $scheme := include "modelswap-engine.controlScheme" . }}
# Gives the engine's container what it needs of modelswap: its image has nothing of it.
- name: engine-files
  image: {{ include "modelswap-engine.image" . }}
  imagePullPolicy: {{ .Values.image.pullPolicy }}
  command:
    {{- toYaml .Values.command | nindent 4 }}
  args: [engine-files, /opt/modelswap-files]
  {{- with .Values.sidecar.extraEnv }}
  env:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  resources:
    {{- toYaml .Values.sidecar.resources | nindent 4 }}
  securityContext:
    {{- include "modelswap-engine.restrictedContainer" . | nindent 4 }}
  volumeMounts:
    - name: engine-files
      mountPath: /opt/modelswap-files
    {{- with .Values.sidecar.extraVolumeMounts }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
# A native sidecar: it is up before the engine starts, and outlives it. Its startup does not wait for the engine.
- name: modelswap
  restartPolicy: Always
  image: {{ include "modelswap-engine.image" . }}
  imagePullPolicy: {{ .Values.image.pullPolicy }}
  command:
    {{- toYaml .Values.command | nindent 4 }}
  args:
    - proxy
    - --backend={{ .Values.engine.kind }}
    - --upstream=http://127.0.0.1:{{ int .Values.engine.port }}
    {{- include "modelswap-engine.commonArgs" . | nindent 4 }}
    - --checkpoint-dir=/var/lib/modelswap-checkpoints
    - --checkpoint-bytes={{ include "modelswap-engine.bytes" .Values.engine.checkpoints.sizeLimit }}
    - --runtime-dir=/run/modelswap
    - --engine-restart={{ lower .Values.engine.restart }}
    {{- with .Values.maxQueue }}
    - --max-queue={{ int . }}
    {{- end }}
    - --drain-seconds={{ int .Values.drainSeconds }}
    {{- with .Values.extraArgs }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  env:
    - name: MODELSWAP_POD_UID
      valueFrom:
        fieldRef:
          fieldPath: metadata.uid
    - name: HOME
      value: /tmp
    {{- with .Values.sidecar.extraEnv }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  ports:
    - name: http
      containerPort: 8000
      protocol: TCP
    - name: {{ $port }}
      containerPort: 8001
      protocol: TCP
  startupProbe:
    {{- include "modelswap-engine.httpProbe" (dict "path" "/livez" "port" $port "scheme" $scheme "probe" .Values.probes.startup) | nindent 4 }}
  readinessProbe:
    {{- include "modelswap-engine.httpProbe" (dict "path" "/readyz" "port" $port "scheme" $scheme "probe" .Values.probes.readiness) | nindent 4 }}
  livenessProbe:
    {{- include "modelswap-engine.httpProbe" (dict "path" "/livez" "port" $port "scheme" $scheme "probe" .Values.probes.liveness) | nindent 4 }}
  resources:
    {{- toYaml .Values.sidecar.resources | nindent 4 }}
  securityContext:
    {{- include "modelswap-engine.restrictedContainer" . | nindent 4 }}
  volumeMounts:
    - name: assignment
      mountPath: /etc/modelswap/assignment
      readOnly: true
    - name: state
      mountPath: /var/lib/modelswap
    - name: tmp
      mountPath: /tmp
    - name: token
      mountPath: /var/run/secrets/kubernetes.io/serviceaccount
      readOnly: true
    {{- include "modelswap-engine.controlMount" . | nindent 4 }}
    {{- include "modelswap-engine.storeMount" . | nindent 4 }}
    {{- include "modelswap-engine.claimMounts" . | nindent 4 }}
    {{- include "modelswap-engine.credentialMounts" . | nindent 4 }}
    {{- include "modelswap-engine.trustedMount" . | nindent 4 }}
    {{- include "modelswap-engine.peersMount" . | nindent 4 }}
    - name: checkpoints
      mountPath: /var/lib/modelswap-checkpoints
    - name: runtime
      mountPath: /run/modelswap
    {{- if include "modelswap-engine.modelsVolume" . }}
    - name: models
      mountPath: {{ .Values.models.mountPath }}
      readOnly: true
    {{- end }}
    {{- with .Values.sidecar.extraVolumeMounts }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
{{- end }}

{{- define "modelswap-engine.externalContainers" -}}
# No port of its own: it listens on 127.0.0.1, and the sidecar is the only door.
- name: engine
  image: {{ include "modelswap-engine.engineImage" . }}
  imagePullPolicy: {{ .Values.engine.image.pullPolicy }}
  command:
    - {{ .Values.engine.python }}
    - -m
    - modelswap_engine.backends.launch
    - --engine={{ .Values.engine.kind }}
    - --port={{ int .Values.engine.port }}
    - --runtime-dir=/run/modelswap
    - --wait-seconds={{ int .Values.engine.waitSeconds }}
    - --stop-seconds={{ int .Values.engine.stopSeconds }}
    - --
  args:
    {{- if .Values.engine.command }}
    {{- toYaml .Values.engine.command | nindent 4 }}
    {{- else if eq .Values.engine.kind "vllm" }}
    - vllm
    - serve
    - "{model}"
    - --served-model-name={{ include "modelswap-engine.servedModelName" . }}
    {{- else }}
    - {{ .Values.engine.python }}
    - -m
    - sglang.launch_server
    - --model-path={model}
    - --served-model-name={{ include "modelswap-engine.servedModelName" . }}
    {{- end }}
    {{- with .Values.engine.args }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  env:
    - name: PYTHONPATH
      value: /opt/modelswap-files
    # Short: sockets in it have at most 107 bytes of path.
    - name: TMPDIR
      value: /tmp
    - name: HOME
      value: /tmp
    # The user has no entry in /etc/passwd, and engines ask for its name.
    - name: USER
      value: modelswap
    {{- with .Values.extraEnv }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  lifecycle:
    preStop:
      exec:
        command:
          - {{ .Values.engine.python }}
          - -m
          - modelswap_engine.backends.drain
          - --control-port=8001
          {{- if .Values.controlTls.enabled }}
          - --tls
          {{- end }}
          - --seconds={{ add (int .Values.drainSeconds) 10 }}
          - --runtime-dir=/run/modelswap
  # Fails only while the sidecar wants the engine restarted. The port has a number: names are looked up in this container.
  livenessProbe:
    {{- include "modelswap-engine.httpProbe" (dict "path" "/engine-livez" "port" 8001 "scheme" (include "modelswap-engine.controlScheme" .) "probe" .Values.probes.liveness) | nindent 4 }}
  resources:
    {{- toYaml .Values.resources | nindent 4 }}
  securityContext:
    {{- include "modelswap-engine.restrictedContainer" . | nindent 4 }}
  volumeMounts:
    - name: engine-files
      mountPath: /opt/modelswap-files
      readOnly: true
    - name: checkpoints
      mountPath: /var/lib/modelswap-checkpoints
      readOnly: true
    - name: runtime
      mountPath: /run/modelswap
    - name: engine-tmp
      mountPath: /tmp
    - name: shm
      mountPath: /dev/shm
    {{- if include "modelswap-engine.modelsVolume" . }}
    # What changes is read inside the engine, where it is to lie: by the same path as the sidecar's.
    - name: models
      mountPath: {{ .Values.models.mountPath }}
      readOnly: true
    {{- end }}
    {{- with include "modelswap-engine.storeMount" . }}
    {{- . | nindent 4 }}
      readOnly: true
    {{- end }}
    {{- include "modelswap-engine.claimMounts" . | nindent 4 }}
    {{- with .Values.extraVolumeMounts }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
{{- end }}

{{- define "modelswap-engine.externalVolumes" -}}
- name: engine-files
  emptyDir:
    sizeLimit: 64Mi
# Whole checkpoints, written by the sidecar and read by the engine.
- name: checkpoints
  emptyDir:
    sizeLimit: {{ .Values.engine.checkpoints.sizeLimit }}
# What launcher and sidecar tell each other, the admin key among it: in memory, and gone with the pod.
- name: runtime
  emptyDir:
    medium: Memory
    sizeLimit: 1Mi
- name: engine-tmp
  emptyDir:
    sizeLimit: {{ .Values.engine.tmp.sizeLimit }}
{{- end }}

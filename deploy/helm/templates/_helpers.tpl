{{- define "sameway.name" -}}
{{- if contains .Chart.Name .Release.Name }}{{ .Release.Name }}{{ else }}{{ printf "%s-%s" .Release.Name .Chart.Name }}{{ end }}
{{- end }}

{{- define "sameway.fullname" -}}
{{- include "sameway.name" . | trunc 50 | trimSuffix "-" }}
{{- end }}

{{- define "sameway.selector" -}}
app.kubernetes.io/name: {{ .root.Chart.Name }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end }}

{{- define "sameway.labels" -}}
{{ include "sameway.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version }}
{{- end }}

{{- define "sameway.image" -}}
{{- printf "%s:%s" (.image.repository | default .root.Values.image.repository) (.image.tag | default .root.Values.image.tag | default .root.Chart.AppVersion) }}
{{- end }}

{{- /* The pod of a gateway or an engine: `component`, `image`, `resources`, `secretFiles`, `root`. */ -}}
{{- define "sameway.pod" -}}
automountServiceAccountToken: false
serviceAccountName: {{ include "sameway.fullname" .root }}
terminationGracePeriodSeconds: {{ .root.Values.terminationGracePeriodSeconds }}
{{- with .root.Values.imagePullSecrets }}
imagePullSecrets: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .root.Values.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with .nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile: {type: RuntimeDefault}
{{- with .affinity }}
affinity: {{- toYaml . | nindent 2 }}
{{- else }}
topologySpreadConstraints:
  - maxSkew: 1
    topologyKey: kubernetes.io/hostname
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels: {{- include "sameway.selector" . | nindent 8 }}
{{- end }}
containers:
  - name: {{ .component }}
    image: {{ include "sameway.image" . | quote }}
    imagePullPolicy: {{ .root.Values.image.pullPolicy }}
    env:
      - {name: SAMEWAY_CONFIG, value: /etc/sameway/config/sameway.yaml}
      - {name: SAMEWAY_HOST, value: "0.0.0.0"}
      - {name: SAMEWAY_PORT, value: "8080"}
      - {name: SAMEWAY_DATA_DIR, value: /data}
      {{- if eq .component "engine" }}
      - name: SAMEWAY_API_KEY
        valueFrom: {secretKeyRef: {name: {{ .root.Values.secretName }}, key: ENGINE_API_KEY}}
      {{- end }}
      {{- with .root.Values.extraEnv }}
      {{- toYaml . | nindent 6 }}
      {{- end }}
    {{- if eq .component "gateway" }}
    envFrom:
      - secretRef: {name: {{ .root.Values.secretName }}}
    {{- end }}
    ports:
      - {name: http, containerPort: 8080}
    startupProbe:
      httpGet: {path: /healthz, port: http}
      periodSeconds: 2
      failureThreshold: 60
    livenessProbe: # never /readyz: models take time to load
      httpGet: {path: /healthz, port: http}
      periodSeconds: 10
      timeoutSeconds: 3
    readinessProbe:
      httpGet: {path: /readyz, port: http}
      periodSeconds: 5
      timeoutSeconds: 3
    lifecycle: # the balancers' time to leave this pod out
      preStop: {exec: {command: [sleep, "5"]}}
    securityContext:
      allowPrivilegeEscalation: false
      readOnlyRootFilesystem: true
      capabilities: {drop: [ALL]}
    resources: {{- toYaml .resources | nindent 6 }}
    volumeMounts:
      - {name: data, mountPath: /data}
      - {name: config, mountPath: /etc/sameway/config, readOnly: true}
      - {name: tmp, mountPath: /tmp}
      - {name: kernels, mountPath: /opt/sameway/lib/sameway} # the engine's, compiled at the start
      {{- range .secretFiles }}
      - {name: {{ printf "secret-%s" . }}, mountPath: {{ printf "/etc/sameway/secrets/%s" . }}, readOnly: true}
      {{- end }}
volumes:
  - name: config
    configMap: {name: {{ printf "%s-%s" (include "sameway.fullname" .root) .component }}}
  - {name: tmp, emptyDir: {}}
  - {name: kernels, emptyDir: {}}
  {{- range .secretFiles }}
  - name: {{ printf "secret-%s" . }}
    secret: {secretName: {{ . }}}
  {{- end }}
{{- end }}

{{- define "sameway.configmap" -}}
apiVersion: v1
kind: ConfigMap
metadata:
  name: {{ printf "%s-%s" (include "sameway.fullname" .root) .component }}
  labels: {{- include "sameway.labels" . | nindent 4 }}
data:
  sameway.yaml: |
    {{- toYaml .config | nindent 4 }}
{{- end }}

{{/* The pod of the Job that downloads the model. Call with (list $ model command). What it says of a failure lies
beside the model, where the pods that wait for it have no other way to learn of it. */}}
{{- define "tandem.downloadPod" -}}
{{- $root := index . 0 -}}{{- $model := index . 1 -}}{{- $fetch := index . 2 -}}
{{- $download := $root.Values.model.download -}}
{{- include "tandem.checkNames" (list "model.download.volumes" $download.volumes (list "model" "tmp")) -}}
metadata:
  labels:
    {{- include "tandem.componentSelector" (list $root "download") | nindent 4 }}
    app.kubernetes.io/instance: {{ $root.Release.Name }}
    {{- with $root.Values.commonLabels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
    {{- with $download.labels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- with $download.annotations }}
  annotations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  restartPolicy: OnFailure
  serviceAccountName: {{ include "tandem.serviceAccount" (list $root "worker") }}
  automountServiceAccountToken: false
  enableServiceLinks: false
  {{- include "tandem.pullSecrets" $root | nindent 2 }}
  securityContext:
    {{- toYaml $root.Values.podSecurityContext | nindent 4 }}
  containers:
    - name: download
      image: {{ include "tandem.image" (list $root "cpu") }}
      imagePullPolicy: {{ $root.Values.image.pullPolicy }}
      terminationMessagePolicy: FallbackToLogsOnError
      command:
        - bash
        - -c
        - |
          set -o pipefail
          if grep -qxsF "$MODEL" "$MODEL_PATH/.complete"; then exit; fi
          mkdir -p "$MODEL_PATH" || exit
          { read -r job attempt < "$MODEL_PATH/.attempts"; } 2>/dev/null
          test "$job" = "$JOB" || attempt=
          # Of a new Job, what an earlier one said is over.
          test -n "$attempt" || rm -f "$MODEL_PATH/.failed"
          attempt=$((attempt + 1))
          echo "$JOB $attempt" > "$MODEL_PATH/.attempts"
          "$@" 2>&1 | tee "$HOME/download.log"
          status=$?
          if test $status = 0; then
            rm -f "$MODEL_PATH/.failed"
            echo "$MODEL" > "$MODEL_PATH/.complete"
            exit
          fi
          test "$attempt" -ge "$ATTEMPTS" && next="given up" || next="again soon"
          # The pods that wait read the first two lines, and show the others.
          {
            echo "$MODEL"
            echo "$next"
            echo "attempt $attempt of $ATTEMPTS ended with status $status ($next):"
            tr "\r" "\n" < "$HOME/download.log" | tail -n 8 | cut -c 1-300
          } > "$MODEL_PATH/.failed.new" && mv "$MODEL_PATH/.failed.new" "$MODEL_PATH/.failed"
          exit $status
        - download
        {{- toYaml $fetch | nindent 8 }}
      env:
        - name: MODEL
          value: {{ $model.marker | quote }}
        - name: MODEL_PATH
          value: /volume/{{ $model.subPath }}
        # With restartPolicy OnFailure the Job ends when its container has been restarted backoffLimit times.
        - name: ATTEMPTS
          value: {{ max 1 (int $download.backoffLimit) | quote }}
        - name: JOB
          valueFrom:
            fieldRef:
              fieldPath: metadata.labels['batch.kubernetes.io/controller-uid']
        - name: HOME
          value: /tmp
        {{- with $download.endpoint }}
        - name: HF_ENDPOINT
          value: {{ . }}
        {{- end }}
        {{- with $download.tokenSecret.name }}
        - name: HF_TOKEN
          valueFrom:
            secretKeyRef:
              name: {{ . }}
              key: {{ $download.tokenSecret.key }}
        {{- end }}
        {{- with $download.env }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      {{- $limits := omit $download.resources "requests" }}
      resources:
        limits:
          {{- toYaml $limits | nindent 10 }}
        requests:
          {{- include "tandem.requests" (list $limits $download.resources.requests "model.download.resources") | nindent 10 }}
      securityContext:
        {{- toYaml $root.Values.containerSecurityContext | nindent 8 }}
      volumeMounts:
        - name: model
          mountPath: /volume
        - name: tmp
          mountPath: /tmp
        {{- with $download.volumeMounts }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
  volumes:
    - name: model
      persistentVolumeClaim:
        claimName: {{ $model.claim }}
    - name: tmp
      emptyDir: {}
    {{- with $download.volumes }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
{{- end -}}

{{/* What a pod runs first: it ends when the model is there and, with what the Job said, when the Job has given up. The
kubelet then shows that text as the pod's state, and starts it again later. */}}
{{- define "tandem.waitModel" -}}
- |
  said=
  until grep -qxsF "$MODEL" "$MODEL_PATH/.complete"; do
    { read -r failed; read -r next; text=$(cat); } 2>/dev/null < "$MODEL_PATH/.failed" || failed=
    if test "$failed" != "$MODEL"; then text="waiting for $MODEL"; next=; fi
    test "$failed" = "$MODEL" && text="the download of $MODEL fails: $text"
    test "$text" = "$said" || echo "$text"
    said=$text
    if test "$next" = "given up"; then
      echo "correct model.download (a gated model needs tokenSecret) and run helm upgrade; where nothing of it was"
      echo "wrong, delete the Job first"
      exit 1
    fi
    sleep 5
  done
{{- end -}}
